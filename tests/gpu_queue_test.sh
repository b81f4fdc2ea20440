#!/bin/sh
# scripts/gpu --minutes with stand-ins for the programs: one that fails, one that hangs, one for which there is no time, one that is
# not there; tests side by side and in parts; and calls that go on where the one before ended.
# Usage: gpu_queue_test.sh SCRIPTS_GPU
gpu=$1 status=0
folder=$(mktemp -d) || exit 3
trap 'rm -rf "$folder"' EXIT
build=$folder/build state=$folder/state
mkdir "$build" "$state"

# stand_in NAME TEXT: a program that counts its calls, and then does so.
stand_in() {
  printf '#!/bin/sh\necho "%s $*" >>"%s"\n%s\n' "$1" "$folder/calls" "$2" >"$build/$1"
  chmod +x "$build/$1"
}
stand_in hopper_test 'echo hello'
# In parts: the third one fails.
stand_in fused_forms_test '[ "$GTEST_SHARD_INDEX" != 2 ] || { echo "a failure of $GTEST_TOTAL_SHARDS" && exit 1; }'
stand_in hopper_facts_test '[ -z "$EVENKEEL_SMALL" ] || exit 0; sleep 1000 & wait'
stand_in any_plan_test 'exit 0'
stand_in gpt2_cuda_test 'exit 77'
stand_in evenkeel 'echo "$* $EVENKEEL_KERNELS" >>"'$folder'/kernels" && echo "${XDG_CACHE_HOME##*/}"'
stand_in compute-sanitizer 'shift 4 && echo "${EVENKEEL_SMALL}" && exec "$@"'
for name in fp8_test conform_gpu_test device_product_test optimizer_cuda_test cross_entropy_test; do stand_in $name 'exit 0'; done # and ranks_cuda_test is not there
PATH=$build:$PATH
unset XDG_CACHE_HOME
touch "$build/libevenkeel.so"
# The hanging step has half as much again as its estimate and 15 s more. Nobody has 1000 seconds but the second call.
"$gpu" --list | sed -n 's/^\([a-z0-9_]*\) .* s  waits$/\1/p' >"$folder/names"
{
  printf '{"attention_new_1": 5, "attention_old_1": 5, "attention_new_2": 5, "attention_old_2": 5,\n'
  printf ' "fp8_new_1": 5, "fp8_old_1": 5, "fp8_new_2": 5, "fp8_old_2": 5,\n'
  printf ' "train_new_1": 5, "train_old_1": 5, "train_new_2": 5, "train_old_2": 5,\n'
  while read -r name; do
    case $name in hopper_facts_test) estimate=-9.3 ;; any_plan_test_*) estimate=1000 ;; *) estimate=5 ;; esac
    printf ' "%s": %s,\n' "$name" "$estimate"
  done <"$folder/names"
  printf ' "": 0}\n'
} >"$state/estimates.json"
cp "$build/evenkeel" "$build/old"

call() { said=$("$gpu" --build "$build" --state "$state" --old "$build/old" --at-once 1 "$@" 2>&1); code=$?; printf '%s\n' "$said" >"$folder/said"; }
# expect WHAT CONDITION...
expect() {
  what=$1
  shift
  "$@" && return
  printf '%s: expected that, found exit code %s and:\n%s\n' "$what" "$code" "$said"
  status=1
}
line() { printf '%s\n' "$said" | sed -n '/^step /,$p' | grep -q "^$1 .*$2"; }
calls() { [ "$(grep -c "^$1 " "$folder/calls")" = "$2" ]; }

call --list
expect "a list exits with 0" [ $code = 0 ]
expect "a list has estimates" line any_plan_test_4_of_4 "1000 s  waits"
expect "a list says how much there is to do" grep -q "they need 4.* s for tests" "$folder/said"
expect "a list starts nothing" [ ! -e "$folder/calls" ]

call --minutes 2
expect "a failure is the exit code" [ $code = 1 ]
expect "a step that passes" line hopper_test_2_of_2 passed
expect "its output is kept" grep -q hello "$state/hopper_test_2_of_2.log"
expect "a part that fails" line fused_forms_test_3_of_6 "FAILED (exit code 1)"
expect "its output has its name" grep -q "a failure of 6" "$state/fused_forms_test_3_of_6.log"
expect "the other parts" line fused_forms_test_4_of_6 passed
expect "a step that hangs" line hopper_facts_test "FAILED: not done in 1 s"
expect "a step for which there is no time" line any_plan_test_1_of_4 waits
expect "which was not reached" grep -q "^not reached: any_plan_test_1_of_4, any_plan_test_2_of_4, any_plan_test_3_of_4, any_plan_test_4_of_4$" "$folder/said"
expect "a step that is skipped" line gpt2_cuda_test_2_of_2 skipped
expect "small shapes with every access checked" grep -q "^1$" "$state/hopper_facts_test_memcheck.log"
expect "other kernels by name" grep -q "^conform .* ampere$" "$folder/kernels"
expect "their bench" grep -q "^bench attention --gpu --quick ampere$" "$folder/kernels"
expect "a program that is not there" line ranks_cuda_test "FAILED: .*ranks_cuda_test does not start"
expect "the old and the new program in turns" line attention_old_2 passed
expect "the forms" grep -q "^evenkeel bench attention --gpu --forms" "$folder/calls"
expect "its training, too" line train_old_2 passed
expect "each of the two chooses its own products" [ "$(tail -qn 1 "$state/train_old_1.log" "$state/train_new_1.log" | tr '\n' .)" = cache_of_old.. ]
expect "and so do tests" grep -q "^cache_of_tests$" "$state/conform_far.log"
expect "the new program's turns, five benches and the judge twice; the old one's turns" calls evenkeel 19

call --minutes 20
expect "the second call starts what waited" line any_plan_test_4_of_4 passed
expect "the second call repeats nothing that passed" calls hopper_test 4
expect "the second call repeats nothing that failed" calls fused_forms_test 7
expect "a failure stays one" [ $code = 1 ]
expect "the second call asks again where there was no GPU" calls gpt2_cuda_test 4
expect "nothing is left" [ "$(grep -c "^not reached" "$folder/said")" = 0 ]

stand_in fused_forms_test 'exit 0'
call --minutes 20 --again
expect "--again repeats what failed" line fused_forms_test_3_of_6 passed
expect "--again repeats nothing else" calls hopper_test 4

touch_until_newer() { while [ ! "$1" -nt "$2" ]; do touch "$1"; done; }
touch_until_newer "$build/hopper_test" "$state/steps.json"
call --minutes 20
expect "a program that has changed runs again" calls hopper_test 8

# A call that is stopped stops its step and all that it has started: in a session of its own, without a parent, deaf to SIGTERM.
cat >"$folder/lasting" <<'SH'
#!/bin/sh
[ "$2" != deaf ] || trap '' TERM
echo $$ >>"$1"
exec sleep 1234
SH
chmod +x "$folder/lasting"
stand_in hopper_test "'$folder/lasting' '$folder/runs' & setsid '$folder/lasting' '$folder/runs' deaf & (setsid '$folder/lasting' '$folder/runs' &) ; wait"
rm -f "$folder/runs"
sed -i 's/"hopper_test_1_of_2": 5/"hopper_test_1_of_2": 500/' "$state/estimates.json"
"$gpu" --build "$build" --state "$state" --at-once 1 --minutes 20 --old "$build/old" >"$folder/said" 2>&1 &
asked=$!
while [ "$(cat "$folder/runs" 2>/dev/null | wc -l)" != 3 ]; do :; done
kill -TERM $asked
wait $asked
code=$? said=$(cat "$folder/said")
expect "a call that is stopped says so" [ $code = 143 ]
none_runs() { for process in $(cat "$1"); do ! kill -0 "$process" 2>/dev/null || return 1; done; }
expect "nothing of it runs on" none_runs "$folder/runs"

# What trains beside the tests: a step that hangs is stopped without it, and the first bench waits for its end.
rm -f "$state/steps.json" "$folder/runs"
stand_in hopper_test 'exit 0'
stand_in evenkeel 'exit 0'
cp "$build/evenkeel" "$build/old"
mkdir -p "$folder/copy/scripts"
cp "$(dirname "$gpu")"/gpu "$(dirname "$gpu")"/gpu_queue.py "$folder/copy/scripts/"
cat >"$folder/copy/scripts/study" <<SH
#!/bin/sh
echo "study \$*" >>"$folder/calls"
case \$* in *size*) ;; *) exit 0 ;; esac
while ! grep -q '^conform_far_ampere: passed' "$folder/said"; do :; done # the last test before a bench is over, and one hung before it
echo "study trained" >>"$folder/calls"
SH
chmod +x "$folder/copy/scripts/study"
sed -i 's/"hopper_test_1_of_2": 500/"hopper_test_1_of_2": 5/' "$state/estimates.json"
: >"$folder/calls"
"$folder/copy/scripts/gpu" --build "$build" --state "$state" --old "$build/old" --at-once 1 --minutes 20 --study "$folder/study" \
  --study-first size-flash2-1 --study-only matrix >"$folder/said" 2>&1
code=$? said=$(cat "$folder/said")
expect "what trains beside the tests ends by itself" line study_first passed
expect "a step that hangs beside it is stopped" line hopper_facts_test "FAILED: not done in 1 s"
order() { [ "$(grep -n "$1" "$folder/calls" | head -1 | cut -d: -f1)" -lt "$(grep -n "$2" "$folder/calls" | head -1 | cut -d: -f1)" ]; }
expect "it trains before the tests are over" order "^study .*size-flash2-1" "^gpt2_cuda_test"
expect "the benches wait for it" order "^study trained" "^evenkeel bench"
expect "old and new are compared before the other tests" order "^evenkeel bench train" "^any_plan_test"
expect "the rest of the study comes last" [ "$(grep -c '^study .*--only matrix' "$folder/calls")" = 1 ]

# A study that cannot be started: words, and the steps behind it are tried.
rm "$folder/copy/scripts/study"
"$folder/copy/scripts/gpu" --build "$build" --state "$state" --old "$build/old" --at-once 1 --minutes 20 --study "$folder/study" \
  --study-first size-flash2-1 --study-only matrix >"$folder/said" 2>&1
code=$? said=$(cat "$folder/said")
expect "training that does not start" line study_first "FAILED: .*scripts/study does not start"
expect "the steps behind it" line study "FAILED: .*scripts/study does not start"
expect "no traceback" [ $code = 1 -a "$(grep -c Traceback "$folder/said")" = 0 ]

# Side by side: three at a time and no more, and none beside a bench. One hangs, with a process of a session of its own; its
# neighbours go on only when it has been stopped and a third part runs.
rm -f "$state/steps.json" "$folder/runs"
mkdir "$folder/now"
beside='mkdir "'$folder'/now/$$" && ls "'$folder'/now" | wc -l >>"'$folder'/counts"'
alone='rmdir "'$folder'/now/$$"'
stand_in fused_forms_test "$beside; while [ ! -e '$folder/three' ]; do [ \$(tail -n 1 '$folder/counts') != 3 ] || : >'$folder/three'; done; $alone"
stand_in gpt2_cuda_test "$beside; $alone"
stand_in hopper_facts_test "[ -z \"\$EVENKEEL_SMALL\" ] || exit 0; (setsid '$folder/lasting' '$folder/runs' &); sleep 1000 & wait"
cp "$build/evenkeel" "$build/old"
"$gpu" --build "$build" --state "$state" --old "$build/old" --minutes 20 --at-once 3 >"$folder/said" 2>&1
code=$? said=$(cat "$folder/said")
expect "parts side by side" line fused_forms_test_6_of_6 passed
# By what it said: the most steps that ran at once, and how many of them while a bench ran.
beside() {
  awk '/^[a-z0-9_]+ [.][.][.] / { running++; if ($1 ~ /^(bench|attention|train)_?/) timed++; if (running > most) most = running }
       timed && running > 1 { beside = 1 }
       /^[a-z0-9_]+: / { running--; if ($1 ~ /^(bench|attention|train)_?/) timed-- }
       END { print most, beside + 0 }' "$folder/said"
}
expect "as many as were asked for, and nothing beside a bench" [ "$(beside)" = "3 0" ]
expect "one of them hangs" line hopper_facts_test "FAILED: not done in 1 s"
expect "nothing of it runs on" none_runs "$folder/runs"

printf '{"hopper_test": {"outc' >"$state/steps.json"
call --list
expect "a damaged record is put aside" [ $code = 0 -a -e "$state/steps.bad" ]

call --minutes soon
expect "a time that is none" [ $code = 2 ]
call --minutes 1 --at-once 0
expect "no test at a time" [ $code = 2 ]
call --minutes 1 --unknown
expect "an option that is none" [ $code = 2 ]
call --minutes 1 --study "$folder/study"
expect "a study without parts" [ $code = 2 ]
call --minutes 1 --study-first size
expect "parts without a study" [ $code = 2 ]
mkdir "$folder/alone" && cp "$build/old" "$folder/alone/old"
said=$("$gpu" --build "$build" --state "$state" --old "$folder/alone/old" --minutes 1 2>&1); code=$?
expect "an old program without its library" [ $code = 2 ]
said=$("$gpu" --minutes 1 2>&1); code=$?
expect "no folder for the state" [ $code = 2 ]
exit $status
