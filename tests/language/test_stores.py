"""Instructions that the assembler makes of stores to peers; the README of ``interlace.language``
relies on them.
"""

import re
import subprocess

import pytest
import triton.knobs
from triton.backends.nvidia.compiler import get_ptxas

_PTX = """
.version 8.7
.target {target}
.address_size 64
.visible .entry stores(.param .u64 first, .param .u64 second) {{
    .reg .b64 %address, %value;
    ld.param.u64 %address, [first];
    ld.param.u64 %value, [second];
    st.{store}.b64 [%address], %value;
    st.{store}.v2.b64 [%address + 64], {{%value, %value}};
    ret;
}}
"""


def _instructions(store, capability, folder):
    """Return the stores of the machine code, in the order of their addresses."""
    source, binary = folder / "stores.ptx", folder / "stores.cubin"
    source.write_text(_PTX.format(store=store, target=f"sm_{capability}"))
    subprocess.run(
        [get_ptxas(capability).path, f"-arch=sm_{capability}", source, "-o", binary], check=True
    )
    disassembled = subprocess.run(
        [triton.knobs.nvidia.nvdisasm.path, "-c", binary],
        capture_output=True,
        text=True,
        check=True,
    )
    return sorted(re.findall(r"(STG?\.\S+) ", disassembled.stdout))


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_stores_to_peers_are_what_a_strong_store_is(tmp_path, capability):
    """``st.global.wt``, which PTX calls weak, becomes one instruction of system scope, for 8 bytes
    and for a vector.
    """
    instructions = _instructions("global.wt", capability, tmp_path)
    assert instructions == ["STG.E.128.STRONG.SYS", "STG.E.64.STRONG.SYS"]
    assert instructions == _instructions("relaxed.sys.global", capability, tmp_path)
    assert instructions == _instructions("volatile.global", capability, tmp_path)
