# Installs the package $2 with its tests' dependencies into an environment in $1, and tests it. What
# needs vLLM skips itself there.
python3 -m venv "$1/venv"
"$1/venv/bin/pip" install --quiet --disable-pip-version-check "$2[test]"
# The stubs say what is there. They are read as Python code, and then compared with the module.
"$1/venv/bin/mypy" --config-file "$2/pyproject.toml" --cache-dir "$1/mypy" "$2/ripieno"
(cd "$1" && venv/bin/stubtest --ignore-disjoint-bases ripieno._ripieno)
# Not below /tmp, which may have no direct I/O.
"$1/venv/bin/pytest" "$2/tests" --basetemp="$1/tests"
