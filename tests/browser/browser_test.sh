#!/bin/sh
# The browser tests, where everything they need is here: node, Chromium (EVENKEEL_CHROMIUM names another one), and
# playwright-core in MODULES, where ./evenkeel test puts it. Otherwise says what is missing and is skipped (exit code 77), or
# fails with EVENKEEL_BROWSER=required. Usage: browser_test.sh PROGRAM MODULES
here=$(dirname "$0")
program=$1 modules=$2

leave() {
  echo "browser tests: expected $1, found none"
  [ "${EVENKEEL_BROWSER:-}" = required ] && exit 1
  exit 77
}

for chromium in "${EVENKEEL_CHROMIUM:-}" chromium chromium-browser google-chrome google-chrome-stable; do
  chromium=$(command -v "$chromium") && break
done
[ -n "$chromium" ] || leave "Chromium (Debian's package chromium)"
command -v node >/dev/null || leave "node 18 or newer (Debian's package nodejs)"
[ -e "$modules/node_modules/playwright-core/package.json" ] ||
  leave "playwright-core in $modules (cp $here/package*.json $modules && cd $modules && npm ci)"
exec node "$here/browser_test.mjs" "$program" "$modules" "$chromium"
