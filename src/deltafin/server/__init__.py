"""K3 behind OpenAI's HTTP interface: what is accepted is honoured exactly, the rest is refused before any work.

Knows text and sessions. May import ``text``, ``sessions``, ``generation`` (its events and its engine's name and limits)
and ``errors``; must not know drives, weights or the terminal.
"""
