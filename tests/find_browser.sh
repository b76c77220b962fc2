#!/bin/sh
# A Chromium for the tests that open pages: the one that is there, else Debian's where this user may install packages.
# Without one those tests are skipped with that reason, and under CI they fail.
set -u

found() {
    for name in chromium chromium-browser google-chrome google-chrome-stable chrome; do
        command -v "$name" >/dev/null 2>&1 && return 0
    done
    return 1
}

found && exit 0
if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
    echo "no Chromium here: installing Debian's for the tests that open pages"
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >/dev/null || true
    found && exit 0
fi
echo "no Chromium here, so the tests that open pages in one are skipped; install it: apt-get install chromium" >&2
[ -z "${CI:-}" ]
