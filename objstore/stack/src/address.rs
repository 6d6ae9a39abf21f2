//! Where metrics are served and read.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::PathBuf,
    str::FromStr,
};

/// Address of a metrics endpoint: a path with a `/` (a Unix socket), a port of the loopback
/// interface, or an IP address and a port. Other machines reach only addresses that begin with
/// `public:`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MetricsAddress {
    /// A Unix socket.
    Unix(PathBuf),
    /// A TCP port.
    Tcp(SocketAddr),
}

impl FromStr for MetricsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.contains('/') && !text.ends_with('/') {
            return Ok(Self::Unix(text.into()));
        }
        let (given, is_public) = match text.strip_prefix("public:") {
            Some(rest) => (rest, true),
            None => (text, false),
        };
        let port = given.parse().map(|port| (IpAddr::from(Ipv4Addr::LOCALHOST), port).into());
        match port.or_else(|_| given.parse::<SocketAddr>()) {
            Ok(address) if is_public || address.ip().is_loopback() => Ok(Self::Tcp(address)),
            Ok(address) => Err(format!(
                "other machines reach {address}, and metrics ask for no password; use 127.0.0.1, \
                 or if that is meant write public:{address}"
            )),
            Err(_) => Err(format!(
                "`{text}` is no address; give a port (9400), an IP address and a port \
                 (127.0.0.1:9400, [::1]:9400), or a Unix socket's path with a / (./metrics.sock)"
            )),
        }
    }
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => path.display().fmt(f),
            Self::Tcp(address) => address.fmt(f),
        }
    }
}
