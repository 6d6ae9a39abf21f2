//! GPUs, as described by sysfs and the NVIDIA driver's /proc files.

use crate::pci::Root;
use crate::pci::{self, Function};

/// A GPU and the BAR through which other devices access its memory.
#[derive(Debug, Clone)]
pub(crate) struct Gpu {
    pub(crate) function: Function,
    pub(crate) name: String,
    /// Size of the largest memory BAR (BAR1 on NVIDIA); 0 if the firmware gave it no address.
    pub(crate) window_bytes: u64,
    /// Sizes that the BAR supports (Resizable BAR); empty if it cannot be resized.
    pub(crate) sizes: Vec<u64>,
}

/// Vendor of the GPUs that drives can move data to.
const NVIDIA: u16 = 0x10de;

/// Returns the GPUs, by address: those of NVIDIA, or if there are none all others, such as the
/// graphics of a processor.
pub(crate) fn gpus(root: &Root) -> Vec<Gpu> {
    let mut functions = pci::functions(root);
    functions.retain(Function::is_gpu);
    if functions.iter().any(|function| function.vendor == NVIDIA) {
        functions.retain(|function| function.vendor == NVIDIA);
    }
    functions.into_iter().map(|function| Gpu::read(root, function)).collect()
}

impl Gpu {
    pub(crate) fn is_nvidia(&self) -> bool {
        self.function.vendor == NVIDIA
    }

    fn read(root: &Root, function: Function) -> Self {
        let folder = pci::sysfs(function.bdf);
        let bars = memory_bars(&root.text(format!("{folder}/resource")).unwrap_or_default());
        let (index, window_bytes) =
            bars.into_iter().max_by_key(|&(_, bytes)| bytes).unwrap_or((1, 0));
        // A mask: bit n stands for 2^n MiB.
        let mask = root.text(format!("{folder}/resource{index}_resize"));
        let mask =
            mask.and_then(|text| u64::from_str_radix(text.trim_start_matches("0x"), 16).ok());
        let mask = mask.unwrap_or(0);
        let sizes = (0..43).filter(|bit| mask >> bit & 1 == 1).map(|bit| 1_u64 << (bit + 20));
        let name = model(root, &function);
        Self { name, window_bytes, sizes: sizes.collect(), function }
    }
}

fn model(root: &Root, function: &Function) -> String {
    let about = root.text(format!("/proc/driver/nvidia/gpus/{}/information", function.bdf));
    let model = about.as_deref().and_then(|text| {
        text.lines().find_map(|line| Some(line.strip_prefix("Model:")?.trim().to_owned()))
    });
    let maker = match function.vendor {
        NVIDIA => "NVIDIA",
        0x1002 => "AMD",
        _ => "GPU",
    };
    model.unwrap_or_else(|| format!("{maker} {}", function.ids()))
}

/// Parses the memory BARs, as (index, size), of a `resource` file of start, end and flags per line.
fn memory_bars(resource: &str) -> Vec<(usize, u64)> {
    const MEMORY: u64 = 0x200;
    let hex = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).ok();
    let mut bars = Vec::new();
    for (index, line) in resource.lines().take(6).enumerate() {
        let fields: Vec<u64> = line.split_whitespace().filter_map(hex).collect();
        if let [start, end, flags] = fields[..]
            && flags & MEMORY != 0
            && end > start
        {
            bars.push((index, end - start + 1));
        }
    }
    bars
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_of_memory_have_their_size() {
        let text = "0x0000000094000000 0x0000000094ffffff 0x0000000000040200\n\
                    0x0000380000000000 0x0000381fffffffff 0x000000000014220c\n\
                    0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                    0x000000000000e000 0x000000000000e07f 0x0000000000040101\n";
        assert_eq!(memory_bars(text), [(0, 16 << 20), (1, 128 << 30)]);
    }
}
