#!/usr/bin/env bash
# Makes the virtual environment, and installs the Debian packages that are missing. As an ordinary user it changes nothing
# on the system and says what is missing instead.
#
#   setup.sh demo    what `make demo` needs: virtual hosts, and torch
#   setup.sh         what the tests need as well: Slurm, a browser, git, the development tools
set -euo pipefail
cd "$(dirname "$0")/.."

purpose=${1:-dev}
venv=${VENV:-.venv}
python=${PYTHON:-python3}

# command or file that has to be there -> Debian package that brings it
needed=(
  "/usr/sbin/sshd openssh-server"
  "/usr/bin/ssh-keygen openssh-client"
  "/sbin/ip iproute2"
  "/usr/sbin/iptables iptables"
  "/usr/bin/unshare util-linux"
)
[ "$purpose" = demo ] || needed+=(
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
# What a few tests use and are left out without, should an archive not have it.
wanted=()
[ "$purpose" = demo ] || wanted+=(
  "/usr/bin/prometheus prometheus"
)
missing=()
for line in "${needed[@]}"; do
  read -r path package <<<"$line"
  [ -e "$path" ] || command -v "${path##*/}" >/dev/null || missing+=("$package")
done
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=("python3-venv")

if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "1/3 Debian packages, with apt-get as root: ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  else
    echo "error: these packages are missing: ${missing[*]}" >&2
    echo "hint:  sudo apt-get install ${missing[*]}" >&2
    exit 1
  fi
else
  echo "1/3 Debian packages: all there"
fi

for line in "${wanted[@]}"; do
  read -r path package <<<"$line"
  [ -e "$path" ] && continue
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null &&
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" >/dev/null 2>&1; then
    echo "  and $package"
  else
    echo "  without $package: tests that use it are skipped"
  fi
done

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
  echo "error: dtctl needs Python 3.10 or newer, and $python is $("$python" -V)" >&2
  echo "hint:  make PYTHON=python3.11 ..." >&2
  exit 1
}
echo "2/3 a virtual environment in $venv"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --upgrade 'pip>=25.1'

case $purpose in
  demo) what=(--editable . torch numpy blake3 xxhash) named="dtctl, torch and numpy" ;;
  *) what=(--editable . --group dev) named="dtctl, torch and the development tools" ;;
esac
echo "3/3 Python packages: $named; some hundred MB, minutes on a slow line"
# What is loaded is shown as it comes; the rest of what pip says is left out unless it fails.
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$venv/bin/python" -m pip install --progress-bar off --constraint constraints.txt "${what[@]}" 2>&1 |
  tee "$log" | { grep --line-buffered -E '^ *Downloading |^Installing collected' | cut -c1-100 || true; } || {
  cat "$log" >&2
  exit 1
}
