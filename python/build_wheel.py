"""The build backend of pyproject.toml: `pip install .` builds libevenkeel.so with CMake and puts it beside the package.

Plain Python, so that nothing is downloaded. The wheel is py3-none-PLATFORM: one library for every Python and PyTorch.
EVENKEEL_CMAKE_ARGS adds options of CMake, EVENKEEL_LIBRARY takes a library that is already built.
"""
import base64
import hashlib
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
NAME = "evenkeel"


def version():
    return re.search(r"project\(evenkeel VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text()).group(1)


def metadata():
    return (f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version()}\n"
            "Summary: Attention whose rounding errors do not add up, and the instruments to see where others' do\n"
            "License: MIT\nRequires-Python: >=3.9\n")


def build_library(folder):
    """The path of libevenkeel.so."""
    if os.environ.get("EVENKEEL_LIBRARY"):
        return pathlib.Path(os.environ["EVENKEEL_LIBRARY"])
    if shutil.which("cmake") is None:
        raise SystemExit("evenkeel: expected CMake 3.25 or newer to build the library, found none")
    ninja = ["-G", "Ninja"] if shutil.which("ninja") or shutil.which("ninja-build") else []
    extra = shlex.split(os.environ.get("EVENKEEL_CMAKE_ARGS", ""))
    subprocess.run(["cmake", "-S", str(ROOT), "-B", folder, *ninja, "-DCMAKE_BUILD_TYPE=Release", "-DEVENKEEL_TESTS=OFF",
                    *extra], check=True)
    subprocess.run(["cmake", "--build", folder, "--target", "evenkeel_shared", "--parallel"], check=True)
    return pathlib.Path(folder) / "libevenkeel.so"


def tag():
    return "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")


def information():
    """path in the wheel -> content, of all that is not the package."""
    folder = f"{NAME}-{version()}.dist-info"
    wheel = f"Wheel-Version: 1.0\nGenerator: {NAME}\nRoot-Is-Purelib: false\nTag: {tag()}\n"
    return {f"{folder}/METADATA": metadata().encode(), f"{folder}/WHEEL": wheel.encode(),
            f"{folder}/LICENSE": (ROOT / "LICENSE").read_bytes()}


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    # Without it pip would build everything once for the name, and once more for the content.
    for path, content in information().items():
        place = pathlib.Path(metadata_directory) / path
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(content)
    return place.parent.name


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    info = f"{NAME}-{version()}.dist-info"
    with tempfile.TemporaryDirectory() as folder:
        files = {f"{NAME}/{path.name}": path.read_bytes() for path in sorted((ROOT / "python" / NAME).glob("*.py"))}
        files[f"{NAME}/libevenkeel.so"] = build_library(folder).read_bytes()
    files.update(information())
    record = [f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
              for path, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    wheel = f"{NAME}-{version()}-{tag()}.whl"
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            archive.writestr(zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
    return wheel


def build_sdist(sdist_directory, config_settings=None):
    raise SystemExit("evenkeel: expected `pip install .` or `pip wheel .`; the source distribution is the repository")


if __name__ == "__main__":
    print(build_wheel("."))
