"""What outlives one generation: state points in RAM and on disk, the ids of earlier replies, named conversations.

A conversation that continues finds the state behind the longest known prefix of its tokens and processes only the
rest. Whatever is in doubt is not used: the price of an ordinary full pass is time, the price of a wrong state is a
wrong token. May import ``generation``, ``text``, ``kernels``, ``model`` and ``errors``; must not know HTTP, the
terminal or drives.
"""
