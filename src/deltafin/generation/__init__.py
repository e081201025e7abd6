"""Sessions and the token loop: a draft may propose, K3 decides, what it decides becomes an event.

Knows tokens, never text, and consumes a target through ``forward`` and ``commit``. May import ``model``, ``streaming``,
``store``, ``residency`` and ``errors``; must not know the terminal, HTTP or chat formats.
"""
