//! Errors of layouts.

/// Why a layout cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The parameters are impossible.
    #[error("{0}")]
    Impossible(String),
    /// Not even one file or group fits.
    #[error("{what} has {given} bytes, but one {unit} of this model needs {needed} bytes")]
    TooSmall {
        /// The thing that is too small.
        what: &'static str,
        /// Bytes one unit needs.
        needed: u64,
        /// Bytes given.
        given: u64,
        /// The unit that does not fit: a file, or a group of files.
        unit: &'static str,
    },
}

impl LayoutError {
    pub(crate) fn shape(field: &str, problem: &str) -> Self {
        Self::Impossible(format!("the KV shape's {field} {problem}; give the model's own numbers"))
    }
}
