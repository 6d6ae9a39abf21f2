# Tests the package $2, which is installed in the environment $1/venv. Tests with vLLM run in the
# step `engine`.
"$1/venv/bin/pip" --disable-pip-version-check check
# Types of the whole package and the examples are checked; the stubs are compared with the module.
"$1/venv/bin/mypy" --config-file "$2/pyproject.toml" --cache-dir "$1/mypy" "$2/ripieno" "$2/examples"
(cd "$1" && venv/bin/stubtest --ignore-disjoint-bases ripieno._ripieno)
# Not below /tmp, which may not support direct I/O.
"$1/venv/bin/pytest" "$2/tests" --ignore="$2/tests/with_vllm" --basetemp="$1/tests"
rm -r "$1/tests"
