#!/usr/bin/env bash
# Installs what Cedra needs and this machine lacks. Safe to run again: what is there stays as it is.
#
#   tools/setup.sh            to build and run: a C toolchain
#   tools/setup.sh --tests    to test as well: rustfmt, clippy, the wasm32 target, a software Vulkan driver
#
# With --tests it also writes target/test-env.sh, the environment that the tests run in (tools/test.sh reads it).
# On Debian and Ubuntu it installs with apt, as root or through sudo. Elsewhere it says what to install.
# Files that apt does not own go to $CEDRA_TOOLS (default: ~/.cache/cedra).
set -euo pipefail
cd "$(dirname "$0")/.."
tools=${CEDRA_TOOLS:-${XDG_CACHE_HOME:-$HOME/.cache}/cedra}
wasm=wasm32-unknown-unknown

say() { echo "setup: $*"; }
die() { echo "setup: $*" >&2; exit 1; }

# --- packages -----------------------------------------------------------------------------------------------------

on_debian() { command -v apt-get >/dev/null && command -v dpkg-query >/dev/null; }
installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"
  elif command -v sudo >/dev/null; then sudo "$@"
  else die "needs root for: $*"; fi
}

updated=
apt_update() { [ -n "$updated" ] || as_root apt-get update -qq >/dev/null || say "apt-get update failed; going on with the lists that are there"; updated=1; }

apt_install() { # PACKAGE...
  local missing=() package
  for package in "$@"; do installed "$package" || missing+=("$package"); done
  [ ${#missing[@]} -gt 0 ] || return 0
  say "installing ${missing[*]}"
  apt_update
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# --- C toolchain --------------------------------------------------------------------------------------------------

c_toolchain() {
  echo 'int main(void) { return 0; }' | cc -x c -o /dev/null - 2>/dev/null && return
  on_debian || die "no C compiler. Install one: macOS \`xcode-select --install\`; Fedora \`dnf install gcc\`; Arch \`pacman -S gcc\`;
       Windows: the Visual Studio Build Tools with \"Desktop development with C++\""
  apt_install gcc libc6-dev
}

# --- software Vulkan ----------------------------------------------------------------------------------------------
# Prints the driver's file, or nothing where there is none.

first_file() { local f; for f in "$@"; do [ ! -f "$f" ] || { echo "$f"; return; }; done; }

# Debian 12's own driver is slow and lacks features. The backported one runs on the libraries that Debian 12 has, so it
# needs neither an upgrade nor a change of apt's sources: it is unpacked on its own, below $tools.
backported_driver() {
  local home=$tools/lavapipe library mirror scratch
  if [ ! -f "$home/libvulkan_lvp.so" ]; then
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Codename: bookworm' | head -1)
    [ -n "$mirror" ] || return 0
    say "unpacking a recent software Vulkan driver into $home" >&2
    scratch=$(mktemp -d)
    mkdir -p "$scratch/lists/partial" "$scratch/archives/partial"
    printf 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s bookworm-backports main\n' "$mirror" >"$scratch/sources"
    local apt=(apt-get -qq -o "Dir::Etc::SourceList=$scratch/sources" -o Dir::Etc::SourceParts=/dev/null
      -o "Dir::State::Lists=$scratch/lists" -o "Dir::Cache=$scratch" -o APT::Sandbox::User=)
    if "${apt[@]}" update >&2 && (cd "$scratch" && "${apt[@]}" download mesa-vulkan-drivers/bookworm-backports >&2); then
      dpkg-deb -x "$scratch"/mesa-vulkan-drivers_*.deb "$scratch/root"
      library=$(find "$scratch/root" -name libvulkan_lvp.so | head -1)
      if [ -n "$library" ] && ! ldd "$library" | grep -q 'not found'; then
        mkdir -p "$home"
        sed "s#\(\"library_path\": *\)\"[^\"]*\"#\1\"$home/libvulkan_lvp.so\"#" "$scratch"/root/usr/share/vulkan/icd.d/lvp_icd*.json >"$home/lvp_icd.json"
        cp "$library" "$home/"
      fi
    fi
    rm -rf "$scratch"
    [ -f "$home/libvulkan_lvp.so" ] || return 0
  fi
  echo "$home/lvp_icd.json"
}

software_vulkan() {
  driver=$(first_file "${VK_DRIVER_FILES:-}")
  if [ -z "$driver" ] && on_debian; then
    apt_install libvulkan1 mesa-vulkan-drivers
    if [ "$(. /etc/os-release && echo "${VERSION_CODENAME:-}")" = bookworm ]; then driver=$(backported_driver); fi
  fi
  [ -n "$driver" ] || driver=$(first_file /usr/share/vulkan/icd.d/lvp_icd*.json)
  case $driver in
    '') say "no software Vulkan driver: the tests use the system's GPU (Fedora: \`dnf install mesa-vulkan-drivers\`; Arch: \`pacman -S vulkan-swrast\`)" ;;
    *) say "software Vulkan: $driver" ;;
  esac
}

# --- wasm32 -------------------------------------------------------------------------------------------------------
# Sets `web`, the toolchain whose cargo builds for wasm32.

builds_wasm() { # TOOLCHAIN
  local scratch; scratch=$(mktemp -d)
  echo 'pub fn f() -> std::collections::HashMap<u8, u8> { Default::default() }' >"$scratch/lib.rs"
  local rc=0
  rustup run "$1" rustc --crate-type cdylib --target "$wasm" -o "$scratch/lib.wasm" "$scratch/lib.rs" >/dev/null 2>&1 || rc=1
  rm -rf "$scratch"; return $rc
}

# Where rustup cannot fetch the target, Debian's rustc-web has a compiler and the sources of std: std is built once.
debian_wasm() {
  local home=$tools/rust-web host scratch std llvm
  builds_wasm cedra-web && { web=cedra-web; return; }
  on_debian && apt-cache show rustc-web >/dev/null 2>&1 || return 0
  say "building std for $wasm from Debian's rustc-web (some minutes, once)"
  host=$(rustc --print sysroot)
  rm -rf "$home"; mkdir -p "$home"; scratch=$(mktemp -d)
  std=$(apt-cache depends libstd-rust-web-dev | sed -n 's/.*Depends: \(libstd-rust-web-[0-9.]*\)$/\1/p' | head -1)
  llvm=$(apt-cache depends "$std" | sed -n 's/.*Depends: \(libllvm[0-9]*\)$/\1/p' | head -1)
  (cd "$scratch" && apt-get -o APT::Sandbox::User= download -qq rustc-web libstd-rust-web-dev rust-web-src "$std" "$llvm" >/dev/null
    for deb in *.deb; do dpkg-deb -x "$deb" "$home"; done)
  local usr=$home/usr triple
  triple=$(rustc -vV | sed -n 's/^host: //p')
  find "$usr/lib" -mindepth 2 -maxdepth 2 -name '*.so*' -exec ln -sft "$usr/lib" {} +
  ln -sfn "$host/lib/rustlib/$triple/bin" "$usr/lib/rustlib/$triple/bin" # the linker
  ln -sf "$host/bin/cargo" "$usr/bin/cargo"
  rustup toolchain link cedra-web "$usr"

  mkdir "$scratch/src"; echo '#![no_std]' >"$scratch/src/lib.rs"
  printf '[package]\nname = "empty"\nedition = "2021"\n[workspace]\n' >"$scratch/Cargo.toml"
  (cd "$scratch" && RUSTC_BOOTSTRAP=1 CARGO_TARGET_DIR=$scratch/target cargo +cedra-web build -q --release --target "$wasm" \
    -Z build-std=std,panic_abort,panic_unwind,proc_macro,test)
  mkdir -p "$usr/lib/rustlib/$wasm/lib"
  rm -f "$scratch/target/$wasm/release/deps"/libempty-*
  cp "$scratch/target/$wasm/release/deps"/lib*.rlib "$scratch/target/$wasm/release/deps"/lib*.rmeta "$usr/lib/rustlib/$wasm/lib/"
  rm -rf "$scratch"
  ! builds_wasm cedra-web || web=cedra-web
}

wasm_target() {
  local active
  active=$(rustup show active-toolchain | cut -d' ' -f1)
  web=
  if builds_wasm "$active"; then web=$active
  elif timeout 120 rustup -q target add "$wasm" >/dev/null 2>&1 && builds_wasm "$active"; then web=$active
  else debian_wasm; fi
  [ -n "$web" ] || die "no $wasm target: \`rustup target add $wasm\` failed. Is the network there?"
  say "$wasm: toolchain $web"
}

# ------------------------------------------------------------------------------------------------------------------

command -v cargo >/dev/null || die "no Rust: install it from https://rustup.rs"
c_toolchain
say "C toolchain: $(command -v cc || echo "of the system")"
case ${1:-} in
  '') exit ;;
  --tests) ;;
  *) die "unknown argument \`$1\`; allowed: --tests" ;;
esac
command -v rustup >/dev/null || die "the tests need rustup (for the wasm32 target): https://rustup.rs"
cargo fmt --version >/dev/null 2>&1 && cargo clippy --version >/dev/null 2>&1 || {
  say "adding rustfmt and clippy"
  rustup -q component add rustfmt clippy >/dev/null
}
wasm_target
software_vulkan

mkdir -p target
{
  echo "export CEDRA_WEB_TOOLCHAIN='$web'"
  if [ -n "$driver" ]; then
    echo "export VK_DRIVER_FILES='$driver' VK_ICD_FILENAMES='$driver' VK_LOADER_LAYERS_DISABLE='*'"
    echo 'export XDG_RUNTIME_DIR="${XDG_RUNTIME_DIR:-/tmp}"'
  fi
} >target/test-env.sh
say "environment of the tests: . target/test-env.sh"
