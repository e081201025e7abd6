"""What the router chose, kept on disk: the heat histogram that outlives a run, and traces of every committed route.

Both are advisory. Knows expert numbers and two small file formats; must not know drives, tensors, tokens or policies.
May import ``errors``. A damaged or foreign heat file is worth nothing and never stops a run; a trace is read only when
the user names it, so there a damaged one is an error.
"""
