"""Translating a quantized checkpoint into another format. Never rounds a weight anew.

Codes and zero points stay what they are; scales stay, too, unless the new format has no place for their dtype.
Everything but the codes is read and checked before the first byte is written.
"""

from quantkit.convert.plan import Conversion
from quantkit.convert.run import Converted, convert

__all__ = ["Conversion", "Converted", "convert"]
