//! An instantiated graph: recorded work that can be replayed, and the owners of what it points to.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::arena::Arena;
use crate::cuda;
use crate::device::Device;
use crate::digest::Digest;
use crate::emission::Emission;

/// Recorded work. It holds every arena that it points into, so a replay never meets a stale address.
#[derive(Clone)]
pub struct Exec {
    // Before the arenas: a graph goes before what it points to.
    form: Form,
    device: Device,
    label: Arc<str>,
    emission: Arc<Emission>,
    keeps: Arc<[Arena]>,
    digest: Digest,
}

/// How long a device took to make an exec; zero on the host device, where the recorded list is the exec.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// Recording the launches.
    pub capture: Duration,
    /// Making them executable.
    pub instantiate: Duration,
    /// Bringing that to the device.
    pub upload: Duration,
}

/// What a device makes of a capture.
#[derive(Clone)]
pub(crate) enum Form {
    /// The recorded list itself.
    List,
    /// A CUDA graph.
    Graph(Arc<cuda::Graph>),
}

impl Exec {
    pub(crate) fn new(
        device: Device,
        label: String,
        emission: Emission,
        keeps: Vec<Arena>,
        form: Form,
    ) -> Exec {
        let digest = emission.digest();
        Exec { form, device, label: label.into(), emission: Arc::new(emission), keeps: keeps.into(), digest }
    }

    /// What was captured.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// The digest of the emission that was captured.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Number of nodes: on a CUDA device those that the driver made.
    pub fn nodes(&self) -> usize {
        match &self.form {
            Form::List => self.emission.len(),
            Form::Graph(graph) => graph.nodes(),
        }
    }

    /// Bytes that it takes beside what it points to; on a CUDA device an estimate by its nodes.
    pub fn bytes(&self) -> usize {
        match &self.form {
            Form::List => self.emission.bytes(),
            Form::Graph(graph) => self.emission.bytes() + graph.bytes(),
        }
    }

    /// How long it took to make.
    pub fn times(&self) -> Times {
        match &self.form {
            Form::List => Times::default(),
            Form::Graph(graph) => graph.times(),
        }
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn form(&self) -> &Form {
        &self.form
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
