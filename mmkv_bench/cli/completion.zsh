autoload -Uz compinit; (( $+functions[compdef] )) || compinit
_mmkv_bench() {
    local -a found
    found=("${(@f)$(PROGRAM --complete "${LBUFFER}" 2>/dev/null)}")
    found=(${found:#})
    if (( ${#found} )); then compadd -S '' -Q -- "${found[@]}"; else _files; fi
}
compdef _mmkv_bench PROGRAM
