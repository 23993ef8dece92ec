//! An instantiated graph: recorded work that can be replayed, and the owners of what it points to.

use std::fmt;
use std::sync::Arc;

use crate::arena::Arena;
use crate::digest::Digest;
use crate::emission::Emission;
use crate::host::Host;

/// Recorded work. It holds every arena that it points into, so a replay never meets a stale address.
#[derive(Clone)]
pub struct Exec {
    host: Arc<Host>,
    label: Arc<str>,
    emission: Arc<Emission>,
    keeps: Arc<[Arena]>,
    digest: Digest,
}

impl Exec {
    pub(crate) fn new(host: Arc<Host>, label: String, emission: Emission, keeps: Vec<Arena>) -> Exec {
        let digest = emission.digest();
        Exec { host, label: label.into(), emission: Arc::new(emission), keeps: keeps.into(), digest }
    }

    /// What was captured.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// The digest of the emission that was captured.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Number of nodes.
    pub fn nodes(&self) -> usize {
        self.emission.len()
    }

    /// Bytes that it takes beside what it points to.
    pub fn bytes(&self) -> usize {
        self.emission.bytes()
    }

    pub(crate) fn host(&self) -> &Arc<Host> {
        &self.host
    }

    pub(crate) fn emission(&self) -> &Arc<Emission> {
        &self.emission
    }

    pub(crate) fn keeps(&self) -> &[Arena] {
        &self.keeps
    }
}

/// The graph as text: its label and digest, then one line per node.
impl fmt::Display for Exec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "exec {} nodes {} digest {:.12}", self.label, self.nodes(), self.digest)?;
        write!(f, "{}", self.emission)
    }
}
