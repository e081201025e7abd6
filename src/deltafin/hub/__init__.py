"""The Hugging Face hub as a source of released files: pinned revisions, ranged resumable reads, verified downloads.

Metadata, addresses and credentials come from ``huggingface_hub``; payload goes through our own ranged reads on top of
the resolved addresses. Everything a hub says is hostile until it agrees with a pinned or announced checksum; only
named, inert files are taken and nothing is executed. May import ``checkpoint``, ``store`` and ``errors``; must not know
the model, caches or the terminal. This is the only room that opens outgoing connections.
"""
