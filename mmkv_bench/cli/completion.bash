_mmkv_bench() {
    local line="${COMP_LINE:0:COMP_POINT}"
    local word="${line##*[[:space:]]}"
    COMPREPLY=()
    while IFS= read -r found; do
        [ -n "$found" ] && COMPREPLY+=("$found")
    done < <(PROGRAM --complete "$line" 2>/dev/null)
    # What stands before the last '=' or ':' is on the line already where readline breaks words there.
    local kept="${word%"${COMP_WORDS[COMP_CWORD]}"}"
    if [ "${COMP_WORDS[COMP_CWORD]}" = "=" ]; then kept="$word"; fi
    COMPREPLY=("${COMPREPLY[@]#"$kept"}")
}
complete -o nospace -o default -F _mmkv_bench PROGRAM
