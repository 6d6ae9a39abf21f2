"""Replaces CUDA's libraries by one of their symbols, and loads vLLM's kernels for this CPU.

torch on PyPI is linked against CUDA's libraries, 3 GB that are never called without a GPU. They are
not installed; a library of 80 KB has their symbols. With the argument `probe` it only loads.
"""

import pathlib
import re
import subprocess
import sys

# Libraries that torch/lib needs and no package provides.
ABSENT = """libcublas.so.13 libcublasLt.so.13 libcudnn.so.9 libcufft.so.12 libcufile.so.0
    libcupti.so.13 libcurand.so.10 libcusolver.so.12 libcusparse.so.12 libcusparseLt.so.0
    libnccl.so.2 libnvrtc.so.13 libnvshmem_host.so.3""".split()
# The names of their symbols, also in C++.
CUDA = re.compile(
    r"(_Z\d*)?(cublas|cudnn|cufft|cuFile|cupti|curand|cusolver|cusparse|p?nccl|nvrtc|nvshmem)"
)


def symbols(which, libraries):
    command = ["nm", "-D", "-j", which, *libraries]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def stand_in(lib):
    """Makes the library, with the version of each symbol."""
    libraries = [path for path in lib.iterdir() if ".so" in path.name]
    defined = {symbol.split("@")[0] for symbol in symbols("--defined-only", libraries)}
    wanted = {one for one in symbols("--undefined-only", libraries) if CUDA.match(one)}
    versions, source = {}, '.section .note.GNU-stack,"",@progbits\n.text\n'
    for name, _, version in sorted(one.partition("@") for one in wanted):
        if name not in defined:
            source += f".globl {name}\n.type {name}, @function\n{name}:\n"
            versions.setdefault(version, []).append(name)
    assembly, script = lib / "no-cuda.s", lib / "no-cuda.map"
    # A call of any of them crashes at once.
    assembly.write_text(source + "ud2\n")
    versions.pop("", None)
    nodes = [f"{version} {{ {'; '.join(names)}; }};\n" for version, names in versions.items()]
    script.write_text("".join(nodes))
    library = lib / "libno-cuda.so"
    link = ["c++", "-shared", "-nostdlib", "-o", library, assembly]
    subprocess.run([*link, f"-Wl,--version-script={script}"], check=True)
    for name in ABSENT:
        (lib / name).unlink(missing_ok=True)
        (lib / name).symlink_to(library.name)


def probe():
    """Loads the kernels as vLLM does, which chooses those for this CPU.

    vLLM only warns of a module that does not load, so this looks for one of the kernels.
    """
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.ops._C.init_cpu_memory_env


if sys.argv[1:] != ["probe"]:
    stand_in(next(pathlib.Path(sys.prefix).glob("lib/python3*/site-packages/torch/lib")))
probe()
