//! Users and groups by name or number, from /etc/passwd and /etc/group: NSS cannot be linked
//! statically.

use serde::{Deserialize, Serialize};

use crate::pci::Root;
use crate::problem::{Problem, Result};

/// The owner of the VFIO group node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Owner {
    pub(crate) uid: Option<u32>,
    pub(crate) gid: Option<u32>,
}

impl Owner {
    /// Resolves `--user` and `--group`; `None` if neither was given.
    pub(crate) fn named(
        root: &Root,
        user: Option<&str>,
        group: Option<&str>,
    ) -> Result<Option<Self>> {
        let uid = user.map(|name| number(root, "user", "/etc/passwd", name)).transpose()?;
        let gid = group.map(|name| number(root, "group", "/etc/group", name)).transpose()?;
        Ok((uid.is_some() || gid.is_some()).then_some(Self { uid, gid }))
    }

    /// Returns the mode of the node: a group has access only if one was named.
    pub(crate) fn mode(&self) -> u32 {
        if self.gid.is_some() { 0o660 } else { 0o600 }
    }

    /// Formats the owner for chown(1).
    pub(crate) fn spec(&self) -> String {
        let text = |id: Option<u32>| id.map(|id| id.to_string()).unwrap_or_default();
        let group = self.gid.map(|gid| format!(":{gid}")).unwrap_or_default();
        format!("{}{group}", text(self.uid))
    }
}

fn number(root: &Root, what: &str, file: &str, name: &str) -> Result<u32> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    let entries = root.text(file).unwrap_or_default();
    let found = entries.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok()).flatten()
    });
    found.ok_or_else(|| {
        Problem::usage(
            format!("no {what} `{name}` in {file}"),
            format!("give the number of a {what} that comes from a directory service"),
        )
    })
}
