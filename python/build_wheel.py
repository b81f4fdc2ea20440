"""The build backend of pyproject.toml: `pip install .` builds libevenkeel.so and the program with CMake; `pip wheel .` and a source
distribution too.

Plain Python, so that nothing is downloaded where CMake is there. The wheel is py3-none-PLATFORM: one library for every Python
and PyTorch. EVENKEEL_CMAKE_ARGS adds options of CMake; EVENKEEL_LIBRARY and EVENKEEL_PROGRAM take what is already built.
"""
import base64
import hashlib
import io
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
import tarfile
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
NAME = "evenkeel"
LEAST_CMAKE = (3, 25)
# What every Linux of a manylinux tag has (PEP 600's policy); anything else would have to be in the wheel.
SYSTEM_LIBRARIES = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "ld-linux-x86-64.so.2",
                    "ld-linux-aarch64.so.1"}
# Of a source distribution: what the build, the tests and the documentation need.
LEFT_OUT = {".git", ".github", "build", "__pycache__", "runs", ".cache"}


def version():
    return re.search(r"project\(evenkeel VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text()).group(1)


def metadata():
    return (f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version()}\n"
            "Summary: Attention whose rounding errors do not add up, and the instruments to see where others' do\n"
            "License: MIT\nRequires-Python: >=3.9\nDescription-Content-Type: text/markdown\n\n"
            + (ROOT / "README.md").read_text(encoding="utf-8"))


def cmake_version():
    """(major, minor) of the CMake on the PATH; (0, 0): none."""
    if shutil.which("cmake") is None:
        return 0, 0
    found = re.search(r"version (\d+)\.(\d+)", subprocess.run(["cmake", "--version"], capture_output=True, text=True).stdout)
    return tuple(map(int, found.groups())) if found else (0, 0)


def get_requires_for_build_wheel(config_settings=None):
    """CMake from the package index, only where the machine has none that is new enough."""
    built = os.environ.get("EVENKEEL_LIBRARY") and os.environ.get("EVENKEEL_PROGRAM")
    return [] if built or cmake_version() >= LEAST_CMAKE else [f"cmake>={LEAST_CMAKE[0]}.{LEAST_CMAKE[1]}"]


def built_products(folder):
    """The paths of libevenkeel.so and of the program."""
    library, program = os.environ.get("EVENKEEL_LIBRARY"), os.environ.get("EVENKEEL_PROGRAM")
    if library and program:
        return pathlib.Path(library), pathlib.Path(program)
    found = cmake_version()
    if found < LEAST_CMAKE:
        raise SystemExit(f"evenkeel: expected CMake {LEAST_CMAKE[0]}.{LEAST_CMAKE[1]} or newer to build the library, found "
                         f"{'.'.join(map(str, found)) if found > (0, 0) else 'none'}; pip install cmake")
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        raise SystemExit("evenkeel: expected a C++20 compiler (g++ 12 or newer), found none; CXX names another")
    ninja = ["-G", "Ninja"] if shutil.which("ninja") or shutil.which("ninja-build") else []
    extra = shlex.split(os.environ.get("EVENKEEL_CMAKE_ARGS", ""))
    subprocess.run(["cmake", "-S", str(ROOT), "-B", folder, *ninja, "-DCMAKE_BUILD_TYPE=Release", "-DEVENKEEL_TESTS=OFF",
                    *extra], check=True)
    subprocess.run(["cmake", "--build", folder, "--target", "evenkeel_shared", "evenkeel", "--parallel"], check=True)
    return pathlib.Path(folder) / "libevenkeel.so", pathlib.Path(folder) / "evenkeel"


def needs(binary):
    """What a binary asks of the system, symbol by symbol: the libraries, and the newest glibc (major, minor)."""
    read = lambda *options: subprocess.run(["objdump", *options, str(binary)], capture_output=True, text=True, check=True).stdout
    libraries = set(re.findall(r"NEEDED\s+(\S+)", read("-p")))
    undefined = [line for line in read("-T").splitlines() if "*UND*" in line]
    versions = [tuple(map(int, v.split("."))) for line in undefined for v in re.findall(r"GLIBC_([0-9.]+)", line)]
    others = sorted({v for line in undefined for v in re.findall(r"\(?((?:GLIBCXX|CXXABI|GCC)_[0-9.]+)", line)})
    return libraries, max(((*v, 0)[:2] for v in versions), default=(2, 17)), others


def tag(binaries=()):
    """manylinux_X_Y where all that the binaries need is in glibc X.Y; the machine's own name otherwise."""
    machine = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    if not binaries or platform.system() != "Linux" or shutil.which("objdump") is None:
        return "py3-none-" + machine
    newest = (2, 17)
    for binary in binaries:
        libraries, glibc, others = needs(binary)
        if others or not libraries <= SYSTEM_LIBRARIES:
            print(f"evenkeel: no manylinux tag: {binary} needs {', '.join([*sorted(libraries - SYSTEM_LIBRARIES), *others])}")
            return "py3-none-" + machine
        newest = max(newest, glibc)
    return f"py3-none-manylinux_{newest[0]}_{newest[1]}_{platform.machine()}"


def information(wheel_tag):
    """path in the wheel -> content, of all that is not the package."""
    folder = f"{NAME}-{version()}.dist-info"
    wheel = f"Wheel-Version: 1.0\nGenerator: {NAME}\nRoot-Is-Purelib: false\nTag: {wheel_tag}\n"
    return {f"{folder}/METADATA": metadata().encode(), f"{folder}/WHEEL": wheel.encode(),
            f"{folder}/LICENSE": (ROOT / "LICENSE").read_bytes()}


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    # Without it pip would build everything once for the name, and once more for the content.
    for path, content in information(tag()).items():
        place = pathlib.Path(metadata_directory) / path
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(content)
    return place.parent.name


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    info, data = f"{NAME}-{version()}.dist-info", f"{NAME}-{version()}.data"
    with tempfile.TemporaryDirectory() as folder:
        files = {f"{NAME}/{path.name}": path.read_bytes() for path in sorted((ROOT / "python" / NAME).glob("*.py"))}
        library, program = built_products(folder)
        wheel_tag = tag([library, program])
        files[f"{NAME}/libevenkeel.so"] = library.read_bytes()
        files[f"{NAME}/include/evenkeel.h"] = (ROOT / "include" / "evenkeel.h").read_bytes()
        files[f"{data}/scripts/evenkeel"] = program.read_bytes()
    files.update(information(wheel_tag))
    record = [f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
              for path, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    wheel = f"{NAME}-{version()}-{wheel_tag}.whl"
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in files.items():
            entry = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
            entry.external_attr = (0o100755 if "/scripts/" in path else 0o100644) << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return wheel


def source_files():
    """Of the source tree, without what is built: those that git knows where it is there."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True)
    if listed.returncode == 0 and listed.stdout:
        names = listed.stdout.decode().rstrip("\0").split("\0")
    else:
        names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*")]
    return sorted(name for name in names if (ROOT / name).is_file() and not LEFT_OUT & set(pathlib.PurePath(name).parts))


def build_sdist(sdist_directory, config_settings=None):
    top = f"{NAME}-{version()}"
    with tarfile.open(pathlib.Path(sdist_directory) / f"{top}.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for name in source_files():
            archive.add(ROOT / name, f"{top}/{name}", recursive=False)
        content = metadata().encode()
        entry = tarfile.TarInfo(f"{top}/PKG-INFO")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return f"{top}.tar.gz"


if __name__ == "__main__":
    print(build_wheel("."))
