#!/bin/sh
# The command of the source tree, ./evenkeel, in a tree of its own with a stand-in for CMake. What does it build, and when? What
# does it say about a build folder that is not as it must be? Usage: wrapper_test.sh WRAPPER
set -u
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT || exit 1
mkdir -p "$work/tree/src" "$work/tree/include" "$work/tree/cmake" "$work/bin"
cp "$1" "$work/tree/evenkeel"
touch "$work/tree/CMakeLists.txt" "$work/tree/CMakePresets.json"
# Configures and builds a program that says its name; counts the builds.
cat >"$work/bin/cmake" <<'CMAKE'
#!/bin/sh
case $1 in
  --version) echo "cmake version 3.25.1" ;;
  --preset)
    mkdir -p build && : >build/build.ninja
    printf 'CMAKE_HOME_DIRECTORY:INTERNAL=%s\nEVENKEEL_CUDA:STRING=AUTO\n' "$PWD" >build/CMakeCache.txt
    ;;
  --build)
    echo built >>"$2/../builds"
    [ -e "$2/evenkeel" ] || printf '#!/bin/sh\necho evenkeel 0.0 "$@"\n' >"$2/evenkeel"
    chmod +x "$2/evenkeel"
    ;;
esac
CMAKE
# The compiler, Ninja and the libraries are there, whatever this machine has.
printf '#!/bin/sh\n[ "$1" != -dumpfullversion ] || echo 12.2.0\n' >"$work/bin/g++"
printf '#!/bin/sh\n' >"$work/bin/ninja"
chmod +x "$work"/bin/*
cd "$work/tree" || exit 1

status=0
# expect NAME CODE PATTERN COMMAND...: the exit code, and a pattern in what is said.
expect() {
  name=$1 code=$2 pattern=$3
  shift 3
  said=$(PATH="$work/bin:$PATH" CXX=g++ EVENKEEL_INSTALL=no "$@" 2>&1)
  found=$?
  case $said in *"$pattern"*) matches=yes ;; *) matches=no ;; esac
  [ $found = "$code" ] && [ $matches = yes ] && return
  printf '%s: expected exit code %s and "%s", found %s and:\n%s\n' "$name" "$code" "$pattern" "$found" "$said"
  status=1
}
# builds N: so many times CMake was asked to build.
builds() {
  found=$(cat builds 2>/dev/null | wc -l)
  [ "$found" = "$1" ] || { echo "$2: expected $1 builds, found $found"; status=1; }
}

expect "help before the build" 0 "usage: ./evenkeel COMMAND" ./evenkeel --help
builds 0 "help before the build"
expect "help of test" 0 "--quick" ./evenkeel test --help
expect "unknown option of test" 2 "unknown option '--fast'" ./evenkeel test --fast
expect "two kinds of test" 2 "--quick or --all" ./evenkeel test --quick --all
echo text >build
expect "build is a file" 3 "expected a folder for the build, found a file" ./evenkeel info
[ "$(cat build)" = text ] || { echo "build is a file: it was changed"; status=1; }
rm build
expect "first call" 0 "evenkeel 0.0 info --json" ./evenkeel info --json
builds 1 "first call"
expect "second call" 0 "evenkeel 0.0 info" ./evenkeel info
builds 1 "second call"
touch -d '1 hour' src/new.cpp
expect "a source changed" 0 "sources changed" ./evenkeel info
builds 2 "a source changed"
rm src/new.cpp
touch -d '1 hour ago' src
expect "after the change" 0 "evenkeel 0.0" ./evenkeel info
before=$(cat builds | wc -l)
: >build/evenkeel
expect "an empty program" 0 "does not start" ./evenkeel info
builds $((before + 1)) "an empty program"
printf '\177ELFgarbage' >build/evenkeel
expect "a damaged program" 0 "does not start" ./evenkeel info
builds $((before + 2)) "a damaged program"
expect "after the repair" 0 "evenkeel 0.0 info" ./evenkeel info
builds $((before + 2)) "after the repair"

# The estimate of the first build goes by bytes of source, however many files they are in, and by cores.
printf '#!/bin/sh\necho 2\n' >"$work/bin/nproc"
chmod +x "$work/bin/nproc"
# estimate NAME MINUTES [WORD...]: what a first build is said to take; the words: before the command.
estimate() {
  name=$1 minutes=$2
  shift 2
  rm -rf build
  expect "estimate, $name" 0 "about $minutes minutes;" "$@" ./evenkeel info
}
rm -rf src
mkdir -p src/attention/cuda
head -c 1600000 /dev/zero >src/attention/one.cpp
estimate "one file" 2
(cd src/attention && split -b 16000 --additional-suffix=.cpp one.cpp part_ && rm one.cpp)
estimate "a hundred files" 2
head -c 800000 /dev/zero >src/attention/cuda/kernels.cuh
[ -e /usr/bin/nvcc ] || estimate "no nvcc" 2 env PATH="$work/bin:/usr/bin:/bin" CUDA_HOME="$work"
printf '#!/bin/sh\n' >"$work/bin/nvcc"
chmod +x "$work/bin/nvcc"
estimate "nvcc" 6
printf '#!/bin/sh\necho 6\n' >"$work/bin/nproc"
estimate "six cores" 2
exit $status
