//! The virtual machine as data: its devices, and the command line that creates it.
//!
//! Always TCG: /dev/kvm may exist and be unusable, and a test that runs differently on two machines
//! is two tests. Device addresses are fixed, because the guest cannot ask a drive for its name
//! before a driver has it. tests/vm/src/hardware.rs is the guest's copy of this page.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::command::cpu::LEAST_CPU;

/// Files in the folder of a boot, and their sizes in bytes. They are sparse.
pub const DRIVE_A: (&str, u64) = ("a.img", 256 << 20);
pub const DRIVE_B1: (&str, u64) = ("b1.img", 128 << 20);
const DRIVE_B2: (&str, u64) = ("b2.img", 64 << 20);
/// Backing file of the memory that stands in for a GPU's.
pub const BAR: (&str, u64) = ("bar.bin", 64 << 20);
const DRIVE_S: (&str, u64) = ("s.img", 64 << 20);
const DRIVE_Z: (&str, u64) = ("z.img", 64 << 20);
const FILES: &[(&str, u64)] = &[DRIVE_A, DRIVE_B1, DRIVE_B2, DRIVE_S, DRIVE_Z, BAR];

/// File behind drive C, which a suite makes if it needs that drive.
pub const DRIVE_C: &str = "c.img";

/// 512-byte LBAs of drive A that fail reads, and that fail writes. A fault covers one sector, and
/// any I/O that touches it fails completely.
const BAD_READ_LBA: u64 = 15_000;
const BAD_WRITE_LBA: u64 = 200_000;

/// Destination of the first serial line.
#[derive(Debug)]
pub enum Console {
    /// A socket, because QEMU's own output would appear in the middle of lines.
    Socket(PathBuf),
    /// The terminal of this process.
    Terminal,
}

/// Parameters of a boot.
#[derive(Debug)]
pub struct Machine<'a> {
    pub kernel: &'a Path,
    pub initrd: &'a Path,
    /// Additional kernel arguments.
    pub arguments: String,
    /// We listen on the sockets, and QEMU connects, so there is no wait for a socket to appear.
    pub console: Console,
    pub control: PathBuf,
    pub qmp: PathBuf,
    /// True for a machine that vLLM runs on: with drive C, which nothing writes to, AVX2, and two
    /// processors and memory for two engines.
    pub is_large: bool,
    /// True for a machine with drives that a store is not made for: S, which has two controllers
    /// with the same namespace, and Z, which is zoned.
    pub is_odd: bool,
}

impl Machine<'_> {
    /// Returns QEMU's arguments. File names are relative to QEMU's working folder.
    pub fn arguments(&self) -> Vec<String> {
        let mut all: Vec<String> = Vec::new();
        let mut add = |words: &str| all.extend(words.split(' ').map(str::to_owned));
        add("-nodefaults -no-user-config -display none -no-reboot");
        // Interrupt remapping needs the split irqchip, and VFIO needs interrupt remapping. One
        // processor: with two, QEMU 7.2 crashes occasionally, when one of them translates an
        // address while the other one moves a device's BAR. It is no slower on two cores, but for
        // vLLM, whose engines would take twice as long.
        add("-machine q35,kernel-irqchip=split -accel tcg");
        match self.is_large {
            true => add("-smp 2 -m 8G -cpu max"),
            false => add(&format!("-smp 1 -m 1G -cpu {LEAST_CPU}")),
        }
        add("-device intel-iommu,intremap=on");
        add("-device isa-debug-exit,iobase=0xf4,iosize=0x04");
        drive_a(&mut add);
        drive_b(&mut add);
        if self.is_large {
            add(&format!(
                "-blockdev driver=file,node-name=c-file,filename={DRIVE_C},read-only=on \
                 -blockdev driver=raw,node-name=c,file=c-file,read-only=on \
                 -device nvme,id=nv2,addr=05.0,serial=RIPIENO-C \
                 -device nvme-ns,bus=nv2,drive=c,nsid=1"
            ));
        }
        if self.is_odd {
            drive_s(&mut add);
            drive_z(&mut add);
        }
        let (bar, bytes) = BAR;
        add(&format!(
            "-object memory-backend-file,id=bar,size={bytes},mem-path={bar},share=on \
             -device ivshmem-plain,memdev=bar,id=iv0,addr=04.0"
        ));
        let mut sockets = vec![("control", &self.control), ("qmp", &self.qmp)];
        let console = match &self.console {
            Console::Socket(path) => {
                sockets.push(("console", path));
                "-serial chardev:console"
            }
            Console::Terminal => "-serial mon:stdio",
        };
        for (id, path) in sockets {
            all.push("-chardev".into());
            all.push(format!("socket,id={id},path={}", path.display()));
        }
        let mut add = |words: &str| all.extend(words.split(' ').map(str::to_owned));
        // In the order of ttyS0 and ttyS1.
        add(console);
        add("-serial chardev:control -mon chardev=qmp,mode=control");
        for (option, path) in [("-kernel", self.kernel), ("-initrd", self.initrd)] {
            all.push(option.into());
            all.push(path.display().to_string());
        }
        all.push("-append".into());
        // Only emergencies on the console: any other message could break a line of the protocol. On
        // a busy host the timer is late, and the kernel's check of it would panic. The TSC is
        // calibrated with it at boot, and on a busy host a second was a quarter of one. An NMI from
        // outside, to a machine that hangs, ends it with what each task waits for.
        all.push(format!(
            "console=ttyS0 quiet loglevel=1 panic=-1 unknown_nmi_panic panic_print=1 \
             no_timer_check tsc=unstable intel_iommu=on {}",
            self.arguments
        ));
        all
    }
}

/// Adds one namespace of 512-byte LBAs with injected errors, behind a hot-plug port.
fn drive_a(add: &mut impl FnMut(&str)) {
    let (file, _) = DRIVE_A;
    add("-device pcie-root-port,id=port0,slot=1,chassis=1,addr=02.0");
    add(&format!(
        "-blockdev driver=blkdebug,node-name=a-faults,image.driver=file,image.filename={file},\
         inject-error.0.event=read_aio,inject-error.0.sector={BAD_READ_LBA},\
         inject-error.0.errno=5,inject-error.0.once=off,\
         inject-error.1.event=write_aio,inject-error.1.sector={BAD_WRITE_LBA},\
         inject-error.1.errno=28,inject-error.1.once=off"
    ));
    add("-blockdev driver=raw,node-name=a,file=a-faults");
    add("-device nvme,id=nv0,bus=port0,serial=RIPIENO-A,drive=a");
}

/// Adds two namespaces: of 4096-byte and of 512-byte LBAs.
fn drive_b(add: &mut impl FnMut(&str)) {
    add("-device nvme,id=nv1,addr=03.0,serial=RIPIENO-B");
    for ((file, _), nsid, lba) in [(DRIVE_B1, 1, 4096), (DRIVE_B2, 2, 512)] {
        add(&format!(
            "-blockdev driver=file,node-name=b{nsid}-file,filename={file} \
             -blockdev driver=raw,node-name=b{nsid},file=b{nsid}-file \
             -device nvme-ns,bus=nv1,drive=b{nsid},nsid={nsid},\
             logical_block_size={lba},physical_block_size={lba}"
        ));
    }
}

/// Adds a subsystem with two controllers that share one namespace.
fn drive_s(add: &mut impl FnMut(&str)) {
    let (file, _) = DRIVE_S;
    add("-device nvme-subsys,id=subsystem,nqn=ripieno-s");
    for (id, slot) in [("nv3", 6), ("nv4", 7)] {
        add(&format!("-device nvme,id={id},addr={slot:02x}.0,serial=RIPIENO-S,subsys=subsystem"));
    }
    add(&format!(
        "-blockdev driver=file,node-name=s-file,filename={file} \
         -blockdev driver=raw,node-name=s,file=s-file \
         -device nvme-ns,bus=nv3,drive=s,nsid=1,shared=on"
    ));
}

/// Adds a zoned namespace.
fn drive_z(add: &mut impl FnMut(&str)) {
    let (file, _) = DRIVE_Z;
    add(&format!(
        "-blockdev driver=file,node-name=z-file,filename={file} \
         -blockdev driver=raw,node-name=z,file=z-file \
         -device nvme,id=nv5,addr=08.0,serial=RIPIENO-Z \
         -device nvme-ns,bus=nv5,drive=z,nsid=1,zoned=on,zoned.zone_size=4M"
    ));
}

/// Creates the files of a boot, all zeroes.
pub fn make_files(folder: &Path) -> Result<()> {
    for (name, bytes) in FILES {
        let path = folder.join(name);
        let made = File::create(&path).and_then(|file| file.set_len(*bytes));
        made.with_context(|| format!("cannot make {}", path.display()))?;
    }
    Ok(())
}

/// Returns the file of this name, if the guest may access it.
pub fn known_file(name: &str) -> Option<&'static str> {
    FILES.iter().map(|&(known, _)| known).find(|&known| known == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_one_word_an_argument() {
        let mut machine = Machine {
            kernel: Path::new("/a folder/vmlinuz"),
            initrd: Path::new("initrd"),
            arguments: "ripieno.suite=x".into(),
            console: Console::Socket("console".into()),
            control: "control".into(),
            qmp: "qmp".into(),
            is_large: false,
            is_odd: false,
        };
        let arguments = machine.arguments();
        assert!(arguments.iter().all(|word| !word.is_empty()), "{arguments:?}");
        assert!(arguments.contains(&"/a folder/vmlinuz".to_owned()));
        let at = arguments.iter().position(|word| word == "-append").unwrap();
        assert!(arguments[at + 1].ends_with(" ripieno.suite=x"));
        let accelerator = arguments.iter().position(|word| word == "-accel").unwrap();
        assert_eq!(arguments[accelerator + 1], "tcg");
        let cpu = arguments.iter().position(|word| word == "-cpu").unwrap();
        assert_eq!(arguments[cpu + 1], LEAST_CPU);
        machine.is_odd = true;
        let odd = machine.arguments();
        assert!(odd.iter().all(|word| !word.is_empty()), "{odd:?}");
        machine.is_large = true;
        let large = machine.arguments();
        assert!(large.iter().all(|word| !word.is_empty()), "{large:?}");
        assert!(!large.contains(&LEAST_CPU.to_owned()), "vLLM does not run on it");
    }

    #[test]
    fn only_files_of_the_machine_are_known() {
        assert_eq!(known_file("bar.bin"), Some("bar.bin"));
        assert_eq!(known_file("../bar.bin"), None);
    }
}
