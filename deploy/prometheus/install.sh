#!/usr/bin/env bash
# Puts prometheus and promtool into a folder: those on PATH, else the ones of Debian's package, unpacked. Nothing is
# installed into the system, nothing is started, and no root is needed where `apt-get download` works for the user.
#
#   deploy/prometheus/install.sh FOLDER
set -euo pipefail

folder=${1:?usage: install.sh FOLDER}
mkdir -p "$folder/bin"
folder=$(cd "$folder" && pwd)

works() { "$folder/bin/prometheus" --version >/dev/null 2>&1 && "$folder/bin/promtool" --version >/dev/null 2>&1; }

works && exit 0
if command -v prometheus >/dev/null && command -v promtool >/dev/null; then
  ln -sf "$(command -v prometheus)" "$(command -v promtool)" "$folder/bin/"
  works && exit 0
fi
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || {
  echo "error: no prometheus and promtool on PATH, and no apt-get to fetch them with; put them on PATH and try again" >&2
  exit 1
}
package=$(mktemp -d "$folder/package.XXXX")
trap 'rm -rf "$package"' EXIT
fetch() { (cd "$package" && apt-get -qq -o APT::Sandbox::User=root download prometheus); }
fetch 2>/dev/null || { apt-get -qq update && fetch; } || {
  echo "error: apt-get could not fetch the package prometheus; put prometheus and promtool on PATH and try again" >&2
  exit 1
}
dpkg-deb -x "$package"/prometheus_*.deb "$folder/unpacked"
ln -sf "$folder/unpacked/usr/bin/prometheus" "$folder/unpacked/usr/bin/promtool" "$folder/bin/"
works || { echo "error: $folder/bin/prometheus does not start" >&2; exit 1; }
