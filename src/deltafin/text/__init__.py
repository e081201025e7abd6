"""Between text and token ids: tokenizer, chat rendering, streaming detokenisation, reply parsing.

May import ``errors`` and ``checkpoint.config``. Must not know models, sessions, drives, HTTP or how ids are
produced. Messages become segments, segments become ids; generated ids become events.

What keeps a conversation apart from its structure: special ids come only from segments marked special, and
structure is recognised only by special ids. Text that spells a control token is encoded, and parsed, as text.
"""
