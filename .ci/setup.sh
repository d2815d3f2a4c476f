#!/usr/bin/env bash
# Makes the virtual environment, and installs the Debian packages that the sandbox and the tests need. As an ordinary
# user it changes nothing on the system and says what is missing instead.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
python=${PYTHON:-python3}

# command or file that has to be there -> Debian package that brings it
needed=(
  "/usr/sbin/sshd openssh-server"
  "/usr/bin/ssh openssh-client"
  "/sbin/ip iproute2"
  "/usr/sbin/iptables iptables"
  "/usr/bin/unshare util-linux"
  "/usr/bin/rsync rsync"
  "/usr/bin/git git"
  "/usr/sbin/munged munge"
  "/usr/sbin/slurmctld slurmctld"
  "/usr/sbin/slurmd slurmd"
  "/usr/bin/sbatch slurm-client"
  "/usr/bin/iperf3 iperf3"
  "/usr/bin/jq jq"
  "/usr/bin/chromium-headless-shell chromium-headless-shell"
  "/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf fonts-dejavu-core"
)
missing=()
for line in "${needed[@]}"; do
  read -r path package <<<"$line"
  [ -e "$path" ] || command -v "${path##*/}" >/dev/null || missing+=("$package")
done
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=("python3-venv")

if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing: ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  else
    echo "error: these packages are missing: ${missing[*]}" >&2
    echo "hint:  sudo apt-get install ${missing[*]}" >&2
    exit 1
  fi
fi

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
  echo "error: dtctl needs Python 3.10 or newer, and $python is $("$python" -V)" >&2
  echo "hint:  make PYTHON=python3.11 ..." >&2
  exit 1
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --upgrade 'pip>=25.1'
"$venv/bin/python" -m pip install --quiet --constraint constraints.txt --editable . --group dev
