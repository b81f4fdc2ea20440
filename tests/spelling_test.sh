#!/bin/sh
# The prose of README.md, docs and the other pages, outside code, spelled as hunspell's British dictionary and tests/words.txt
# have it. Skipped (exit code 77), and said so, where hunspell or the dictionary is missing. Usage: spelling_test.sh ROOT
cd "$1" || exit 1
if ! hunspell -d en_GB -l </dev/null >/dev/null 2>&1; then
  echo "hunspell with its British dictionary is not here (Debian: hunspell hunspell-en-gb): skipped"
  exit 77
fi
words=$(mktemp) || exit 1
trap 'rm -f "$words"' EXIT
# As a personal dictionary wants them: words alone, without comments.
sed -e 's/#.*//' -e 's/ *$//' -e '/^$/d' tests/words.txt >"$words"
misspelled() {
  # Without fenced and indented code, `code`, addresses of links, comments, names of files, and words with digits, capitals inside or underscores.
  sed -e '/^ *```/,/^ *```$/d' -e '/^    /d' -e 's/<!--[^>]*-->//g' -e 's/`[^`]*`//g' -e 's/\](\([^)]*\))/]/g' \
    -e 's/[^ ]*[0-9_][^ ]*//g' -e "s/'s\>//g" -e 's/[A-Za-z]*[./][A-Za-z][A-Za-z./]*//g' -e "s/[A-Za-z]*[a-z][A-Z][A-Za-z]*//g" -e "s/[A-Z][A-Z]*s*\>//g" |
    hunspell -d en_GB -p "$words" -l | sort -u
}
# The test of the test.
if [ "$(echo 'a plian kernel of `codde`' | misspelled)" != plian ]; then
  echo "expected one misspelled word of a planted sentence, found: $(echo 'a plian kernel of `codde`' | misspelled)"
  exit 1
fi
failed=0
for page in *.md docs/*.md; do
  found=$(misspelled <"$page" | tr '\n' ' ')
  [ -z "${found% }" ] || { echo "$page: $found"; failed=1; }
done
[ $failed = 0 ] || echo "expected words of the dictionary or of tests/words.txt"
exit $failed
