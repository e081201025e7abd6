"""The heat histogram as a picture: layers x experts, the concentration curve, and hit rate by memory (one SVG file)."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
import numpy.typing as npt

_GIB = 1 << 30


def svg(counts: npt.NDArray[np.floating], curve: npt.NDArray[np.floating], *, expert_bytes: int, title: str) -> str:
    """Draws a histogram.

    Args:
        counts: [layers, experts].
        curve: share of uses covered by the n most used experts, n = 0 … all.
        expert_bytes: one expert, for the memory axis.
        title: plain text.
    """
    layers, experts = counts.shape
    top = counts.max(axis=1, keepdims=True)
    # Sorted within each layer, so that concentration is visible; brightness is relative to the layer's hottest.
    level = np.sort(counts / np.where(top > 0, top, 1), axis=1)[:, ::-1]
    pixels = (255 * np.sqrt(level)).astype(np.uint8)
    image = base64.b64encode(_png(pixels)).decode()
    total = (len(curve) - 1) * expert_bytes / _GIB
    points = " ".join(
        f"{60 + 400 * i / (len(curve) - 1):.1f},{360 - 300 * curve[i]:.1f}"
        for i in np.unique(np.linspace(0, len(curve) - 1, 400).astype(int)).tolist()
    )
    text = title.replace("&", "&amp;").replace("<", "&lt;")
    ticks = "".join(
        f'<text x="{60 + 400 * share:.0f}" y="380" text-anchor="middle">{share:.0%} ({share * total:,.4g} GiB)</text>'
        f'<text x="52" y="{364 - 300 * share:.0f}" text-anchor="end">{share:.0%}</text>'
        f'<line x1="60" x2="460" y1="{360 - 300 * share:.0f}" y2="{360 - 300 * share:.0f}" stroke="#ddd"/>'
        for share in (0.0, 0.5, 1.0)
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="980" height="410" font-family="sans-serif" font-size="11">'
        f'<rect width="980" height="410" fill="white"/><text x="20" y="22" font-size="14">{text}</text>'
        f'<text x="60" y="48">share of uses covered by the most used experts = hit rate by memory</text>{ticks}'
        f'<polyline points="{points}" fill="none" stroke="#b30000" stroke-width="2"/>'
        f'<text x="520" y="48">use by layer (down, {layers}) and expert (across, hottest first, {experts})</text>'
        f'<image x="520" y="60" width="440" height="300" preserveAspectRatio="none" style="image-rendering:pixelated" '
        f'href="data:image/png;base64,{image}"/></svg>\n'
    )


def _png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """An 8-bit grey PNG."""
    height, width = pixels.shape

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
