# Runs the command line $line in $clone of $root, with only the variables $@. $rustup and $programs
# are this machine's, mounted read-only. The mounts end with the process's namespace.
set -eu
mount -t proc proc "$root/proc"
mount -t sysfs sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmp "$root/tmp"
for folder in "$rustup" "$programs"; do
    mkdir -p "$root$folder"
    mount --bind "$folder" "$root$folder"
    mount -o remount,bind,ro "$root$folder"
done
exec chroot "$root" env -i "$@" sh -c "cd $clone && $line"
