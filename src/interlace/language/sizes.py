"""Sizes that kernels compute while they are compiled.

They are our own, as programs replace ``triton.next_power_of_2`` by a function that Triton does not
compile: SGLang does when it is imported.
"""

import triton

from interlace import units

ceil_div = triton.constexpr_function(units.ceil_div)
next_power_of_2 = triton.constexpr_function(units.next_power_of_2)
