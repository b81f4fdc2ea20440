#!/bin/sh
# install_test.sh SOURCE BUILD: an installation into an empty prefix, used by find_package and by pkg-config after it was moved.
# The wheel, installed by pip into an empty folder. The source distribution.
set -eu
source=$1 build=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
  echo "FAILED: $*" >&2
  exit 1
}

cmake --install "$build" --prefix "$work/first" >"$work/log" || fail "$(cat "$work/log")"
mv "$work/first" "$work/prefix"
prefix=$work/prefix
"$prefix/bin/evenkeel" --version >/dev/null || fail "the program does not run"
libraries=$(dirname "$(find "$prefix" -name evenkeel.pc)")/..
[ -h "$libraries/libevenkeel.so" ] && [ -h "$libraries/libevenkeel.so.1" ] || fail "no links libevenkeel.so and libevenkeel.so.1"
objdump -p "$libraries/libevenkeel.so" | grep -q 'SONAME *libevenkeel.so.1$' || fail "another soname"

cat >"$work/main.c" <<'C'
#include <evenkeel.h>
#include <stdio.h>
int main(void) {
  int32_t draws = -1;
  if (evenkeel_abi_version() != EVENKEEL_ABI_VERSION || evenkeel_plan_draws("flash2", &draws) != EVENKEEL_OK || draws != 0) return 1;
  printf("%s\n", evenkeel_version());
  return 0;
}
C
version=$(sed -n 's/^project(evenkeel VERSION \([0-9.]*\).*/\1/p' "$source/CMakeLists.txt")
export PKG_CONFIG_PATH="$libraries/pkgconfig"
if command -v pkg-config >/dev/null; then
  [ "$(pkg-config --modversion evenkeel)" = "$version" ] || fail "pkg-config: another version"
  cc "$work/main.c" -o "$work/by_pkg_config" $(pkg-config --cflags --libs evenkeel)
  [ "$(LD_LIBRARY_PATH=$libraries "$work/by_pkg_config")" = "$version" ] || fail "what pkg-config linked does not run"
fi
cat >"$work/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.25)
project(user LANGUAGES C)
find_package(evenkeel 0.1 REQUIRED)
add_executable(user main.c)
target_link_libraries(user evenkeel::evenkeel)
CMAKE
cmake -S "$work" -B "$work/b" -DCMAKE_PREFIX_PATH="$prefix" >"$work/log" 2>&1 || fail "$(cat "$work/log")"
cmake --build "$work/b" >"$work/log" 2>&1 || fail "$(cat "$work/log")"
[ "$("$work/b/user")" = "$version" ] || fail "what find_package linked does not run"

# The wheel, with what is built already.
python=
for one in /usr/bin/python3 python3; do
  "$one" -c 'import pip' 2>/dev/null && python=$one && break
done
[ -n "$python" ] || { echo "without pip: the wheel was not tried"; exit 0; }
mkdir "$work/wheels"
cd "$work/wheels"
EVENKEEL_LIBRARY=$build/libevenkeel.so EVENKEEL_PROGRAM=$build/evenkeel "$python" "$source/python/build_wheel.py" >"$work/log"
wheel=$(ls "$work/wheels")
case $wheel in
  *manylinux_2_*) ;;
  *) fail "expected a wheel with a manylinux tag, found $wheel: $(cat "$work/log")" ;;
esac
"$python" -m pip install --quiet --no-index --no-deps --target "$work/site" "$wheel" 2>"$work/log" || fail "pip: $(cat "$work/log")"
"$work/site/bin/evenkeel" --version >/dev/null || fail "the program of the wheel does not run"
unset EVENKEEL_LIBRARY EVENKEEL_PROGRAM
found=$(cd / && PYTHONPATH="$work/site" "$python" -c 'import importlib.util, sys
for name in ("_library", "_program"):  # without the package itself, which needs PyTorch
    spec = importlib.util.spec_from_file_location("evenkeel." + name, sys.path[1] + "/evenkeel/" + name + ".py")
    sys.modules["evenkeel." + name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
print(sys.modules["evenkeel._library"].library_version(), sys.modules["evenkeel._program"].program_path())')
[ "$found" = "$version $work/site/bin/evenkeel" ] || fail "expected library and program of the wheel, found $found"

"$python" -c "import sys; sys.path.insert(0, '$source/python'); import build_wheel; build_wheel.build_sdist('$work')"
tar -tzf "$work/evenkeel-$version.tar.gz" >"$work/list"
for file in CMakeLists.txt pyproject.toml PKG-INFO src/c_api.cpp include/evenkeel.h python/evenkeel/__init__.py cmake/install.cmake; do
  grep -qx "evenkeel-$version/$file" "$work/list" || fail "the source distribution lacks $file"
done
! grep -q '/build/' "$work/list" || fail "the source distribution has a build in it"
echo "installed, linked and run: find_package, pkg-config, $wheel"
