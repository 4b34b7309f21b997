#!/usr/bin/env bash
# Runs the stages of `make test`, given as its arguments, and prints a line for each at the end: what
# passed, and how long it took. A failure does not stop the stages that follow.
set -uo pipefail
logs=.cache/test
mkdir -p "$logs"
lines=() failed=() all=$SECONDS

# Sums the closing lines of all of a stage's pytest runs: "412 passed, 3 skipped".
counts() {
  grep -E '^=+ .* in [0-9.]+s.*=+$' "$1" | grep -oE '[0-9]+ (failed|errors?|passed|skipped|xfailed|xpassed)' |
    awk '{ sub(/s$/, "", $2); if (!($2 in sum)) order[++n] = $2; sum[$2] += $1 }
      END { for (i = 1; i <= n; i++) printf "%s%d %s", (i > 1 ? ", " : ""), sum[order[i]], order[i] }'
}

for stage in "$@"; do
  began=$SECONDS result=passed
  "${MAKE:-make}" "$stage" 2>&1 | tee "$logs/$stage.log" || { result=FAILED; failed+=("$stage"); }
  lines+=("$(printf '%-12s %-6s %5d s  %s' "$stage" "$result" $((SECONDS - began)) "$(counts "$logs/$stage.log")")")
done

echo "== summary"
printf '  %s\n' "${lines[@]}"
if [ ${#failed[@]} = 0 ]; then
  echo "== all passed in $((SECONDS - all)) s"
  exit 0
fi
echo "== FAILED: ${failed[*]} (after $((SECONDS - all)) s)"
for stage in "${failed[@]}"; do
  echo "  run the stage alone:  make $stage${LONG:+ LONG=$LONG}    (its output: $logs/$stage.log)"
  [ "$stage" = test-engine ] && alone="OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind " || alone=""
  sed -nE 's/^(FAILED|ERROR) (tests\/.*)/\2/p' "$logs/$stage.log" | sed 's/ - .*//' | sort -u | head -10 |
    while read -r test; do echo "  run the test alone:   $alone.venv/bin/pytest '$test'"; done
done
exit 1
