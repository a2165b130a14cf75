"""``fsdptoys completion SHELL``: a script that completes the command line in bash, zsh or fish.

The scripts ask ``fsdptoys completion --line LINE`` for the candidates of the last word, so that own
files and new runs are completed too. Nothing here imports torch: an answer takes a fraction of a
second.
"""

import sys
from collections.abc import Sequence

from fsdptoys.errors import ConfigError
from fsdptoys.utils.text import suggestion

from .candidates import complete

LINE = "--line"

SCRIPTS = {
    "bash": """\
_fsdptoys() {
    local line="${COMP_LINE:0:COMP_POINT}" word candidate
    COMPREPLY=()
    while IFS= read -r candidate; do
        COMPREPLY+=("$candidate")
    done < <(fsdptoys completion --line "$line" 2>/dev/null)
    word="${line##*[[:space:]]}"
    # Bash replaces what follows the last of these characters only
    if [[ "$COMP_WORDBREAKS" == *=* && "$word" == *=* ]]; then
        COMPREPLY=("${COMPREPLY[@]#"${word%%=*}="}")
    fi
    if [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *[=./] ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -F _fsdptoys fsdptoys
""",
    "zsh": """\
#compdef fsdptoys
_fsdptoys() {
    local -a open closed
    local candidate
    for candidate in "${(@f)$(fsdptoys completion --line "$LBUFFER" 2>/dev/null)}"; do
        case "$candidate" in
            '') ;;
            *[=./]) open+=("$candidate") ;;
            *) closed+=("$candidate") ;;
        esac
    done
    (( ${#open} )) && compadd -Q -S '' -a open
    (( ${#closed} )) && compadd -Q -a closed
    return 0
}
compdef _fsdptoys fsdptoys
""",
    "fish": """\
function __fsdptoys_candidates
    set -l line (commandline -cp)
    fsdptoys completion --line "$line" 2>/dev/null
end
complete -c fsdptoys -f -k -a '(__fsdptoys_candidates)'
""",
}


def completion_command(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    if argv[:1] == [LINE]:
        candidates = complete(" ".join(argv[1:]))
        sys.stdout.write("".join(f"{candidate}\n" for candidate in candidates))
        return 0
    name = " ".join(argv)
    if name not in SCRIPTS:
        fix = suggestion(
            name,
            list(SCRIPTS),
            f"write one of {', '.join(SCRIPTS)}",
            "fsdptoys completion ",
        )
        raise ConfigError(f"fsdptoys completion {name} is no known shell; {fix}")
    print(SCRIPTS[name], end="")
    return 0
