function __mmkv_bench
    PROGRAM --complete (commandline -cp) 2>/dev/null
end
complete -c PROGRAM -a '(__mmkv_bench)'
