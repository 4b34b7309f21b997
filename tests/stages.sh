#!/usr/bin/env bash
# Runs the stages of `make test` and `make test-all` and prints a line for each: what passed, and how
# many seconds it took. `--` among the arguments separates lanes: lanes run beside each other, the stages
# of a lane one after the other. A failure does not stop the other stages; their output is in .cache/test,
# with durations.json, which `tests/durations.py` prints. MAY: seconds that all may take on two cores;
# more is a warning, never a failure. With RESUME, what has passed on this tree does not run again.
set -uo pipefail
logs=.cache/test
mkdir -p "$logs"
rm -f "$logs"/*.log "$logs"/*.failed
[ -n "${RESUME:-}" ] || rm -f "$logs"/*.passed "$logs"/durations.json
tree=$(python tests/durations.py tree)
[ -z "${MAY:-}" ] || python tests/pace.py

# Sums the closing lines of all of a stage's pytest runs: "412 passed, 3 skipped".
counts() {
  grep -E '^=+ .* in [0-9.]+s.*=+$' "$1" | grep -oE '[0-9]+ (failed|errors?|passed|skipped|xfailed|xpassed)' |
    awk '{ sub(/s$/, "", $2); if (!($2 in sum)) order[++n] = $2; sum[$2] += $1 }
      END { for (i = 1; i <= n; i++) printf "%s%d %s", (i > 1 ? ", " : ""), sum[order[i]], order[i] }'
}

lane() {
  trap 'exit 130' INT
  for stage in "$@"; do
    local began=$SECONDS result=passed
    if [ -n "$tree" ] && [ "$(cat "$logs/$stage.passed" 2>/dev/null)" = "$tree" ]; then
      echo "  $stage passed before"
      continue
    fi
    echo "  $stage …"
    if "${MAKE:-make}" "$stage" >"$logs/$stage.log" 2>&1; then echo "$tree" >"$logs/$stage.passed"; else
      result=FAILED; touch "$logs/$stage.failed"
    fi
    printf '  %-12s %-6s %5d s  %s\n' "$stage" "$result" $((SECONDS - began)) "$(counts "$logs/$stage.log")"
    sed -n '/^=* warning: slow tests/,/^=/{/^=/!s/^/    warning: /p}' "$logs/$stage.log"
  done
}

# With job control each lane is a process group, which an interrupt reaches.
set -m
interrupted=
trap 'interrupted=1; for group in $(jobs -p); do kill -INT -- "-$group" 2>/dev/null; done' INT TERM
echo "== stages (their output is in $logs)"
stages=()
for word in "$@" --; do
  if [ "$word" = -- ]; then
    lane "${stages[@]}" &
    stages=()
  else
    stages+=("$word")
  fi
done
until wait; do :; done
[ -z "$interrupted" ] || exit 130

if [ "$SECONDS" -gt "${MAY:-$SECONDS}" ]; then
  echo "== warning: $SECONDS s, more than the $MAY of docs/developing.md: is the machine busy? \`python tests/durations.py\` prints the slowest tests"
fi
failed=()
for word in "$@"; do [ -e "$logs/$word.failed" ] && failed+=("$word"); done
if [ ${#failed[@]} = 0 ]; then
  # What was left out as passed before took no time.
  if [ -n "${MAY:-}" ] && [ -z "${RESUME:-}" ]; then python tests/pace.py "$SECONDS"; fi
  echo "== all passed in $SECONDS s"
  exit 0
fi
for stage in "${failed[@]}"; do
  echo "== $stage"
  sed -n '/^=* \(FAILURES\|ERRORS\) =*$/,$p' "$logs/$stage.log" | grep . || tail -n 60 "$logs/$stage.log"
done
echo "== FAILED: ${failed[*]} (after $SECONDS s)"
for stage in "${failed[@]}"; do
  echo "  run the stage alone:  make $stage    (its output: $logs/$stage.log)"
  [ "$stage" = test-engine ] && alone="OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind " || alone=""
  sed -nE 's/^(FAILED|ERROR) ((tests|packages)\/.*)/\2/p' "$logs/$stage.log" | sed 's/ - .*//; s/@[^]@]*$//' | sort -u | head -10 |
    while read -r test; do echo "  run the test alone:   $alone.venv/bin/pytest '$test'"; done
done
exit 1
