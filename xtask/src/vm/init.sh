#!/bin/busybox sh
# The guest's first process: sets the stage and runs one suite.
/bin/busybox mkdir -p /bin /sbin /dev /proc /sys /run /tmp /etc /mnt
/bin/busybox --install -s /bin
export PATH=/bin:/sbin
# A root file system in memory is anybody's; --persist wants a program that only root can change.
chmod 755 /
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs run /run
mount -t tmpfs tmp /tmp
# The line to the host carries bytes as they are.
stty -F /dev/ttyS1 raw -echo
suite=$(sed -n 's/.*ripieno\.suite=\([^ ]*\).*/\1/p' /proc/cmdline)
if [ "$suite" = shell ]; then
    echo 'Programs: vm-tests nvme-bind ripieno. Ctrl-A X ends the machine.'
    setsid cttyhack sh
    poweroff -f
fi
# Ends the machine with an exit code, unless it dies before.
vm-tests "$suite"
poweroff -f
