#!/bin/sh
# scripts/nvcc_checked with stand-ins for nvcc: what ptxas calls a potential performance loss fails, all else passes through.
# Usage: nvcc_checked_test.sh NVCC_CHECKED
checked=$1 status=0
# expect NAME CODE SAYS: a compiler that says so and exits with 0, or with CODE_OF_COMPILER.
expect() {
  said=$("$checked" sh -c "printf '%s\n' \"\$1\" >&2; exit ${CODE_OF_COMPILER:-0}" compiler "$3" 2>&1)
  code=$?
  case $said in *"$3"*) shown=yes ;; *) shown=no ;; esac
  [ $code = "$2" ] && [ $shown = yes ] && return
  printf '%s: expected exit code %s and what the compiler said, found %s and:\n%s\n' "$1" "$2" "$code" "$said"
  status=1
}
loss="Potential Performance Loss: wgmma.mma_async instructions are serialized due to"
expect "nothing said" 0 ""
expect "another remark" 0 "ptxas info    : Used 168 registers, used 1 barriers"
expect "another warning" 0 "ptxas warning : (C7048) a function with variable address space"
expect "registers ignored" 1 "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum register requirements."
for code in C7509 C7510 C7511 C7512 C7513 C7514 C7515 C7518; do
  expect "serialised, $code" 1 "ptxas info    : ($code) $loss ill formed pipeline stage in the function 'f'"
done
expect "serialised, by a number that is new" 1 "ptxas info    : (C7999) $loss something else in the function 'f'"
expect "serialised, in words that are new" 1 "ptxas info    : (C7512) wgmma waits"
CODE_OF_COMPILER=2 expect "a compiler that fails" 2 "error: expected a ';'"
exit $status
