#!/bin/sh
# build.sh OUT: the program by mono, and a start script that lets it find the kvconv that is installed.
set -eu
here=$(dirname "$0")
native=$(cd "$("${KVCONV:-kvconv}" doctor --cmake-dir)/.." && pwd)
mcs -langversion:7 -warnaserror -out:"$1.exe" "$here/Generate.cs" "$native"/csharp/Kvconv/*.cs
printf '#!/bin/sh\nexport LD_LIBRARY_PATH="%s${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"\nexec mono "%s.exe" "$@"\n' "$native/../custom_ops" "$(realpath "$1")" > "$1"
chmod +x "$1"
