#!/bin/busybox sh
# The guest's first process: sets up the system and runs one suite.
/bin/busybox mkdir -p /bin /sbin /dev /proc /sys /run /tmp /etc /mnt
/bin/busybox --install -s /bin
export PATH=/bin:/sbin
# Anybody may write to a root file system in memory; --persist needs programs that only root can.
chmod 755 /
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs run /run
mount -t tmpfs tmp /tmp
# The serial line to the host must not change bytes.
stty -F /dev/ttyS1 raw -echo
suite=$(sed -n 's/.*ripieno\.suite=\([^ ]*\).*/\1/p' /proc/cmdline)
if [ "$suite" = shell ]; then
    echo 'Programs: vm-tests nvme-bind ripieno. Ctrl-A X ends the machine.'
    setsid cttyhack sh
    poweroff -f
fi
# Ends the machine with an exit code, unless it crashes.
vm-tests "$suite"
poweroff -f
