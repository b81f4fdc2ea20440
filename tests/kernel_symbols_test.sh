#!/bin/sh
# Objects compiled for a newer CPU must not define what the linker may pick for everyone: inline functions of shared
# headers (weak symbols) outside the target's own namespace. Usage: kernel_symbols_test.sh COMPILER TARGET OBJECT...
compiler=$1 target=$2
shift 2
[ $# -gt 0 ] || { echo "no objects"; exit 1; }

# Lists the shared definitions of an object.
shared() { nm --defined-only "$1" | grep ' [VWuvw] ' | grep -v "$target" | c++filt; }

# The test of the test: a planted inline function.
planted=kernel_symbols_planted_$target.o
echo "inline int shared(int x) { return x + 1; } namespace $target { int f(int x) { return shared(x); } }" |
  $compiler -O0 -x c++ -c -o "$planted" - || exit 1
[ -n "$(shared "$planted")" ] || { echo "a planted inline function is not found: the test is broken"; exit 1; }

status=0
for object in "$@"; do
  nm --defined-only "$object" | grep -q "$target" || { echo "$object: nothing of $target in it"; status=1; }
  found=$(shared "$object")
  [ -z "$found" ] || { printf '%s defines for all CPUs, compiled for %s:\n%s\n' "$object" "$target" "$found"; status=1; }
done
exit $status
