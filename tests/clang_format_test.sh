#!/bin/sh
# Every C, C++ and CUDA file is as .clang-format wants it. Versions differ in detail, so only clang-format 14, Debian 12's, is asked;
# without it the test is skipped (exit code 77). Usage: clang_format_test.sh ROOT
cd "$1" || exit 1
for clang_format in clang-format-14 clang-format; do
  case $($clang_format --version 2>/dev/null) in *'version 14.'*) break ;; esac
  clang_format=
done
if [ -z "$clang_format" ]; then
  echo "clang-format 14 is not here: skipped"
  exit 77
fi
# The test of the test.
if echo 'int  x ;' | $clang_format --dry-run --Werror --assume-filename=src/x.cpp 2>/dev/null; then
  echo "clang-format finds no fault in badly formatted text: the test is broken"
  exit 1
fi
faulty=$(find src tests include tools \( -name '*.h' -o -name '*.c' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) 2>/dev/null | sort |
  xargs $clang_format --dry-run 2>&1 | sed -n 's/^\([^:]*\):[0-9]*:.*warning: code should.*/\1/p' | uniq)
[ -n "$faulty" ] || exit 0
echo "not as .clang-format wants it; this repairs it:"
echo "  $clang_format -i" $faulty
exit 1
