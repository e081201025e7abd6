"""K3 as released, read-only: configuration, tensor index, expert byte layout, spine inventory.

Knows file formats and names; must not know drives, manifests, caches, threads or arithmetic. May import ``errors``.
Everything here treats its input as hostile: sizes are bounded before allocation and no path leaves its folder.
"""
