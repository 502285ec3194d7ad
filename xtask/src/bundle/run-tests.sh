#!/usr/bin/env bash
# Runs the GPU tests of this bundle, one after the other, and counts the results.
# usage: run-tests.sh GPUS [FILTER]
#   GPUS    how many GPUs this machine has; a test that needs more fails, none is skipped for them
#   FILTER  part of the tests' paths; gpu:: if not given
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1
if [[ ! "${1:-}" =~ ^[0-9]+$ ]]; then
    sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
export PACELINE_REQUIRE_GPUS="$1"
filter="${2:-gpu::}"
seconds_max="${PACELINE_TEST_SECONDS:-600}" # a program that runs longer is ended
log="$(mktemp)" || exit 1
trap 'rm -f "$log"' EXIT

count() { # the sum of the numbers before a word in the summaries of the log
    sed -n "s/^test result: .* \([0-9][0-9]*\) $1;.*/\1/p" "$log" | awk '{ sum += $1 } END { print sum + 0 }'
}

passed=0 failed=0 skipped=0 broken=()
for program in tests/*; do
    echo "== $program $filter"
    timeout --kill-after=10 "$seconds_max" \
        "$program" "$filter" --test-threads=1 --show-output >"$log" 2>&1 </dev/null
    code=$?
    cat "$log"
    skips="$(grep -c '^SKIP: ' "$log")"
    passed=$((passed + $(count passed) - skips))
    failed=$((failed + $(count failed)))
    skipped=$((skipped + skips + $(count ignored)))
    if [[ $code -ne 0 ]]; then
        broken+=("$program (exit code $code)")
        # A program that was ended before its summary has failed in a test that no line counts.
        grep -q '^test result: ' "$log" || failed=$((failed + 1))
    fi
done

for program in "${broken[@]}"; do
    echo "failed: $program"
done
echo "GPU tests: $passed passed, $failed failed, $skipped skipped"
if [[ ${#broken[@]} -gt 0 || $failed -gt 0 ]]; then
    exit 1
fi
if [[ $passed -eq 0 ]]; then
    echo "no test ran: is the filter right?" >&2
    exit 1
fi
