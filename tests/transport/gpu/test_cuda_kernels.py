"""The kernels' source compiles, with whatever compiler for CUDA there is here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.transport.gpu import nvrtc
from transport._cuda.kernel_source import FLAGS, PRELUDE, TYPES, source_of
from transport._cuda.kernels import OPTIONS

ALL = PRELUDE + "".join(source_of(name) for name in TYPES)


@pytest.mark.parametrize("source", [ALL, FLAGS], ids=["reductions", "flags"])
def test_the_kernels_compile_with_nvcc(tmp_path: Path, source: str) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc here")
    file = tmp_path / "kernels.cu"
    file.write_text(source)
    command = [nvcc, "-ptx", "-std=c++14", "-arch=compute_75", "-o", f"{file}.ptx", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    text = Path(f"{file}.ptx").read_text()
    for entry in ("fold_bfloat16_AVG", "scale_complex64") if source is ALL else ("signal_flags",):
        assert f".entry {entry}" in text


def need_nvrtc(architecture: int) -> None:
    if nvrtc.load() is None:
        pytest.skip("no NVRTC here: pip install nvidia-cuda-nvrtc-cu12 (or nvidia-cuda-nvrtc)")
    if architecture not in nvrtc.architectures():
        pytest.skip(f"NVRTC {nvrtc.version()} does not compile for sm_{architecture}")


# With the options that CuPy gets, and one module for each dtype, as at run time.
@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("name", ["flags", *TYPES])
def test_the_kernels_compile_to_machine_code_with_nvrtc(name: str, architecture: int) -> None:
    need_nvrtc(architecture)
    source = FLAGS if name == "flags" else PRELUDE + source_of(name)
    log, code = nvrtc.compile_for(source, architecture, *OPTIONS)
    assert code, log
    assert not log, log
    for entry in ("signal_flags", "wait_for_flags") if name == "flags" else (f"fold_{name}_SUM",):
        assert entry.encode() in code


def test_nvrtc_refuses_what_is_wrong() -> None:
    """So that the tests above can fail."""
    need_nvrtc(90)
    log, code = nvrtc.compile_for(FLAGS.replace("st.release", "st.relaese"), 90, *OPTIONS)
    assert not code
    assert "relaese" in log or "ptxas" in log.lower()


def test_there_is_a_kernel_for_each_operation_that_a_dtype_has() -> None:
    """And for no other: what makes no sense is refused before it gets here."""
    import ml_dtypes
    import numpy as np

    from transport._cuda.kernel_source import reduce_kernel_name
    from transport._operands.reduce_op import RedOpType, ReduceOp

    for name in TYPES:
        dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
        for kind in set(RedOpType) - {RedOpType.PREMUL_SUM}:
            try:
                ReduceOp(kind).check(dtype)
            except TypeError:
                applies = False
            else:
                applies = True
            assert (f"FOLD({reduce_kernel_name(name, kind)}," in source_of(name)) == applies, (
                name,
                kind,
            )
