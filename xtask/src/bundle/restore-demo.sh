#!/usr/bin/env bash
# Puts the demo model's weights back into ./paceline, which is packed without them.
# usage: restore-demo.sh [CHECKOUT]   the repository's folder; ../.. of this script if not given
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
checkout="${1:-../..}"
while read -r offset bytes file; do
    source="$checkout/$file"
    if [[ "$(stat --format=%s "$source")" != "$bytes" ]]; then
        echo "$source is not there or not of this bundle's commit: it must have $bytes bytes" >&2
        exit 1
    fi
    dd if="$source" of=paceline bs=64 seek=$((offset / 64)) conv=notrunc status=none
done <demo.txt
