# Installs the wheel $2 into a new environment in $1, and runs the Python program $3 there.
python3 -m venv --clear "$1/check"
"$1/check/bin/pip" install --quiet --disable-pip-version-check --no-index "$2"
rm -rf "$1/store"
cd "$1"
check/bin/python -c "$3"
grep "package_name: pyo3" check/lib/python3*/site-packages/ripieno/THIRD-PARTY.yml
