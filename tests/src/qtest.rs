//! QEMU's NVMe controller as a [`Bus`]: a model by other authors, without a guest.
//!
//! QEMU runs with its CPU stopped. Registers are accessed through its qtest socket; its memory is a
//! file that this process maps too, so that queues and data are plain memory. Doorbells, which the
//! driver and the I/O kernel store to as memory, are a page that is polled whenever a caller
//! waits ([`QtestClock`]) or touches a register, and whose stores are forwarded. There are no
//! interrupts.

mod client;
mod ram;

use std::{
    ffi::OsString,
    fs::File,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use anyhow::{Context, bail};
use nvme_driver::{
    Bus, Clock, DmaSpace, DoorbellPage, Gone, Interrupt, InterruptError, MonotonicClock, Nanos,
    ResetError,
};
use nvme_spec::reg;
use tempfile::TempDir;

use client::Client;
use ram::{Map, PAGE, Ram};

/// Bytes of guest memory.
const RAM_BYTES: usize = 256 << 20;
/// Address that BAR0 is given: unused in QEMU's q35 machine.
const BAR0: u64 = 0xe000_0000;
/// PCI class code of an NVMe controller.
const CLASS_NVME: u32 = 0x01_08_02;
/// Queue pairs that have doorbells, the admin queue included.
const QUEUES: usize = 65;
/// Value of a doorbell that was not rung: no queue is that long.
const QUIET: u32 = u32::MAX;

/// One namespace of the controller.
#[derive(Debug, Clone, Copy)]
pub struct QemuNamespace {
    /// Bytes of a logical block.
    pub lba_bytes: u32,
    /// Total bytes.
    pub bytes: u64,
}

/// Returns the path of QEMU: `RIPIENO_QEMU`, else from the PATH.
#[must_use]
pub fn find() -> Option<PathBuf> {
    const NAME: &str = "qemu-system-x86_64";
    if let Some(path) = std::env::var_os("RIPIENO_QEMU") {
        return Some(path.into());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(NAME)).find(|file| file.is_file())
}

/// A running QEMU and the controller in it.
#[derive(Debug)]
pub struct Qemu {
    bus: Arc<QtestBus>,
    /// Declared after the bus, so that the process is killed last.
    _process: Process,
}

#[derive(Debug)]
struct Process {
    child: Child,
    folder: TempDir,
}

impl Drop for Process {
    fn drop(&mut self) {
        // It has no state that needs an orderly shutdown, and may have exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    /// Returns its stderr, for the message of a failure.
    fn complaint(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("stderr")).unwrap_or_default()
    }
}

impl Qemu {
    /// Starts `program` with a controller that has `namespaces`.
    ///
    /// # Errors
    /// Returns an error if QEMU does not start, or if no controller is found.
    pub fn start(program: &Path, namespaces: &[QemuNamespace]) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir_in(scratch())?;
        let ram = File::create_new(folder.path().join("ram"))?;
        ram.set_len(RAM_BYTES as u64)?;
        drop(ram);
        let arguments = arguments(folder.path(), namespaces)?;
        let child = Command::new(program)
            .args(&arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(folder.path().join("stderr"))?)
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        let process = Process { child, folder };
        match QtestBus::new(process.folder.path()) {
            Ok(bus) => Ok(Self { bus: Arc::new(bus), _process: process }),
            Err(error) => Err(error.context(process.complaint())),
        }
    }

    /// Returns the bus with the controller.
    #[must_use]
    pub fn bus(&self) -> Arc<QtestBus> {
        self.bus.clone()
    }

    /// Returns a clock in real time whose pauses forward doorbells.
    #[must_use]
    pub fn clock(&self) -> Arc<QtestClock> {
        Arc::new(QtestClock { real: MonotonicClock::default(), bus: self.bus.clone() })
    }
}

/// Returns a folder in memory if there is one.
fn scratch() -> PathBuf {
    let shm = PathBuf::from("/dev/shm");
    if shm.is_dir() { shm } else { std::env::temp_dir() }
}

fn arguments(folder: &Path, namespaces: &[QemuNamespace]) -> anyhow::Result<Vec<OsString>> {
    let path = |name: &str| folder.join(name).display().to_string();
    let fixed = [
        // Debian's QEMU has no qtest accelerator; with a stopped CPU any other one works.
        "-accel tcg -S -nodefaults -display none -qtest-log none -m 256M".into(),
        "-machine q35,memory-backend=ram".into(),
        format!("-object memory-backend-file,id=ram,size=256M,share=on,mem-path={}", path("ram")),
        format!("-qtest unix:{},server=on,wait=off", path("qtest")),
        "-device nvme,id=nvme0,addr=04.0,serial=RIPIENO,mdts=7".into(),
    ];
    let mut words: Vec<OsString> =
        fixed.iter().flat_map(|line: &String| line.split(' ').map(Into::into)).collect();
    for (index, namespace) in namespaces.iter().enumerate() {
        let (nsid, lba) = (index + 1, namespace.lba_bytes);
        let image = path(&format!("disk{nsid}"));
        File::create_new(&image)?.set_len(namespace.bytes)?;
        words.extend([
            "-blockdev".into(),
            format!("driver=file,node-name=file{nsid},discard=unmap,filename={image}").into(),
            "-device".into(),
            format!(
                "nvme-ns,bus=nvme0,drive=file{nsid},nsid={nsid},\
                 logical_block_size={lba},physical_block_size={lba}"
            )
            .into(),
        ]);
    }
    Ok(words)
}

/// The controller's PCI function, accessed through qtest.
#[derive(Debug)]
pub struct QtestBus {
    client: Mutex<Client>,
    doorbells: Arc<Map>,
    stride: u32,
    ram: Arc<dyn DmaSpace>,
}

impl QtestBus {
    fn new(folder: &Path) -> anyhow::Result<Self> {
        let mut client = Client::connect(&folder.join("qtest"))?;
        enable_function(&mut client)?;
        let cap = reg::Cap(
            u64::from(client.readl(BAR0 + u64::from(reg::CAP))?)
                | u64::from(client.readl(BAR0 + u64::from(reg::CAP) + 4)?) << 32,
        );
        let stride = 4u32 << cap.dstrd();
        let file = File::options().read(true).write(true).open(folder.join("ram"))?;
        let ram = Ram::new(Map::file(&file, RAM_BYTES)?);
        let doorbells =
            Arc::new(Map::anonymous((2 * QUEUES * stride as usize).next_multiple_of(PAGE))?);
        for index in 0..2 * QUEUES {
            doorbells.store(index * stride as usize, QUIET);
        }
        Ok(Self { client: Mutex::new(client), doorbells, stride, ram })
    }

    fn client(&self) -> MutexGuard<'_, Client> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forwards the doorbells rung since the last call. Returns true if there were any.
    ///
    /// A store between the load and the reset to `QUIET` would be lost, so the thread that rings
    /// must be the one that waits.
    pub fn forward_doorbells(&self) -> bool {
        self.forward(&mut self.client())
    }

    fn forward(&self, client: &mut Client) -> bool {
        let mut any = false;
        for index in 0..2 * QUEUES {
            let offset = index * self.stride as usize;
            let value = self.doorbells.load(offset);
            if value != QUIET {
                self.doorbells.store(offset, QUIET);
                let register = BAR0 + u64::from(reg::DOORBELLS) + offset as u64;
                client.writel(register, value).expect("QEMU takes a doorbell");
                any = true;
            }
        }
        any
    }
}

/// Finds the controller, gives it an address, and enables memory decoding and bus mastering.
fn enable_function(client: &mut Client) -> anyhow::Result<()> {
    const COMMAND: u8 = 0x04;
    const CLASS: u8 = 0x08;
    const BAR: u8 = 0x10;
    const MEMORY_AND_MASTER: u32 = 0b110;
    for device in 0..32 {
        if client.config_read(device, 0)? != reg::ALL_ONES
            && client.config_read(device, CLASS)? >> 8 == CLASS_NVME
        {
            client.config_write(device, BAR, BAR0 as u32)?;
            client.config_write(device, BAR + 4, 0)?;
            return client.config_write(device, COMMAND, MEMORY_AND_MASTER);
        }
    }
    bail!("QEMU's machine has no NVMe controller on bus 0")
}

impl Bus for QtestBus {
    fn id(&self) -> &str {
        "qemu"
    }

    fn read32(&self, offset: u32) -> Result<u32, Gone> {
        let mut client = self.client();
        self.forward(&mut client);
        client.readl(BAR0 + u64::from(offset)).map_err(|_| Gone)
    }

    fn write32(&self, offset: u32, value: u32) -> Result<(), Gone> {
        let mut client = self.client();
        self.forward(&mut client);
        client.writel(BAR0 + u64::from(offset), value).map_err(|_| Gone)
    }

    #[allow(unsafe_code, reason = "vouches for the doorbells")]
    fn doorbells(&self) -> DoorbellPage {
        let len = self.doorbells.len();
        let host = self.doorbells.base().cast();
        // SAFETY: the map is all of the page, and is only read by address on this side.
        unsafe { DoorbellPage::new(host, None, self.stride, len, self.doorbells.clone()) }
    }

    fn dma(&self) -> &Arc<dyn DmaSpace> {
        &self.ram
    }

    fn pci_id(&self) -> Option<(u16, u16)> {
        None
    }

    fn numa_node(&self) -> Option<u32> {
        None
    }

    fn requested(&self) -> bool {
        false
    }

    fn interrupt(&self, vector: u16) -> Result<Interrupt, InterruptError> {
        Err(InterruptError::NoSuchVector { bus: self.id().into(), vector, available: 0 })
    }

    fn reset(&self) -> Result<(), ResetError> {
        Err(ResetError::Unsupported { bus: self.id().into() })
    }

    fn pcie_error(&self) -> bool {
        false
    }
}

/// Real time; a pause also forwards doorbells to QEMU.
#[derive(Debug)]
pub struct QtestClock {
    real: MonotonicClock,
    bus: Arc<QtestBus>,
}

impl Clock for QtestClock {
    fn now(&self) -> Nanos {
        self.real.now()
    }

    fn pause(&self, idle: u32, until: Nanos) {
        if !self.bus.forward_doorbells() {
            // QEMU is another process, possibly on the same core: spinning would only delay it.
            self.real.pause(idle.saturating_add(64), until);
        }
    }
}
