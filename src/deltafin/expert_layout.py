"""Where the six tensors of one routed expert lie inside its blob."""

from __future__ import annotations

from dataclasses import dataclass

GROUP = 32
"""Numbers that share one MXFP4 scale."""

MAX_WIDTH = 1 << 20
"""No expert width comes near this; larger ones are a corrupt configuration."""


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Byte offsets of an expert's tensors relative to the first byte of its blob.

    ``w1`` (gate) and ``w3`` (up) are [intermediate, latent], ``w2`` (down) is [latent, intermediate].
    All are row-major. A packed tensor holds two E2M1 numbers per byte, its scale one E8M0 byte per group of 32 numbers.

    Raises:
        ValueError: a width is not a positive multiple of 32, an offset is negative, or two tensors overlap.
    """

    latent: int
    intermediate: int
    w1_packed: int
    w1_scale: int
    w2_packed: int
    w2_scale: int
    w3_packed: int
    w3_scale: int

    def __post_init__(self) -> None:
        for width in (self.latent, self.intermediate):
            if not 0 < width <= MAX_WIDTH or width % GROUP:
                raise ValueError(f"expert width {width} is not a positive multiple of {GROUP} up to {MAX_WIDTH}")
        end = 0
        for begin, size in sorted(self._spans()):
            if begin < end:
                raise ValueError(f"an expert tensor starts at byte {begin}, before byte {end}")
            end = begin + size

    @classmethod
    def released(cls, latent: int, intermediate: int) -> ExpertLayout:
        """The released order, without gaps: w1, w2, w3, each packed and then its scale.

        Raises:
            ValueError: a width is not a positive multiple of 32.
        """
        packed = latent * intermediate // 2
        scale = latent * intermediate // GROUP
        tensor = packed + scale
        return cls(
            latent=latent,
            intermediate=intermediate,
            w1_packed=0,
            w1_scale=packed,
            w2_packed=tensor,
            w2_scale=tensor + packed,
            w3_packed=2 * tensor,
            w3_scale=2 * tensor + packed,
        )

    @property
    def packed_nbytes(self) -> int:
        """Bytes of one packed tensor; the three are equal."""
        return self.latent * self.intermediate // 2

    @property
    def scale_nbytes(self) -> int:
        """Bytes of one scale tensor; the three are equal."""
        return self.latent * self.intermediate // GROUP

    @property
    def nbytes(self) -> int:
        """Bytes of the blob, up to the end of the tensor that lies last."""
        return max(begin + size for begin, size in self._spans())

    def _spans(self) -> list[tuple[int, int]]:
        packed, scale = self.packed_nbytes, self.scale_nbytes
        return [
            (self.w1_packed, packed),
            (self.w1_scale, scale),
            (self.w2_packed, packed),
            (self.w2_scale, scale),
            (self.w3_packed, packed),
            (self.w3_scale, scale),
        ]
