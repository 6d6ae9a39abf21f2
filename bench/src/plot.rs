//! Plots as SVG.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, anyhow};
use ripieno_sim::{Plot, svg};

/// Draws `plot` into a file, whose folder is made.
///
/// # Errors
/// Returns an error if the file cannot be written.
pub fn write(path: &Path, plot: &Plot) -> Result<()> {
    let svg = svg(plot).map_err(|error| anyhow!("drawing {}: {error}", path.display()))?;
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)
            .with_context(|| format!("making the folder {}", folder.display()))?;
    }
    fs::write(path, svg).with_context(|| format!("writing {}", path.display()))
}
