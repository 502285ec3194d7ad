//! Work that is recorded once and launched any number of times.

use super::{
    Device, DeviceStream, DriverError, Result,
    sys::{CUgraph, CUgraphExec, CUstreamCaptureMode, call},
};

/// An executable graph, bound to the context of the stream that it was captured on.
#[derive(Debug)]
pub struct Graph {
    executable: CUgraphExec,
    device: Device,
}

// SAFETY: the driver lets any thread use a graph, but only one at a time: so there is no `Sync`.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `work` enqueues on `stream` instead of running it. Other threads go on
    /// undisturbed (thread-local capture). The capture is ended also if `work` fails or panics.
    ///
    /// # Errors
    /// What `work` returns; or the driver's error, if `work` did what cannot be captured (allocated
    /// or waited, for instance).
    ///
    /// # Safety
    /// All memory, modules and streams that the recorded work uses must stay alive, and be free of
    /// conflicting use, whenever the graph is launched until that launch has ended.
    pub unsafe fn capture<E: From<DriverError>>(
        stream: &DeviceStream,
        work: impl FnOnce() -> std::result::Result<(), E>,
    ) -> std::result::Result<Self, E> {
        let device = stream.device();
        device.bind()?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        unsafe { call!(device, cuStreamBeginCapture_v2(stream.handle(), mode)) }?;
        let capture = Capture { stream, ended: false };
        work()?;
        let graph = capture.end()?;
        let mut executable = std::ptr::null_mut();
        // SAFETY: the graph is alive until the line after; flags 0: nothing special.
        let instantiated =
            unsafe { call!(device, cuGraphInstantiateWithFlags(&raw mut executable, graph, 0)) };
        // SAFETY: ours, and not needed any more: the executable graph has its own copy.
        unsafe { (device.functions().cuGraphDestroy)(graph) };
        instantiated?;
        Ok(Self { executable, device: device.clone() })
    }

    /// Enqueues that the graph is brought to the device, so that the first launch is as fast as the
    /// others and needs no allocation. Wait for the stream before ranks that spin are launched.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn upload(&self, stream: &DeviceStream) -> Result<()> {
        self.device.bind()?;
        // SAFETY: both handles are alive.
        unsafe { call!(&self.device, cuGraphUpload(self.executable, stream.handle())) }
    }

    /// Enqueues the recorded work on `stream`. Launches of one graph never overlap.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn launch(&self, stream: &DeviceStream) -> Result<()> {
        self.device.bind()?;
        // SAFETY: both handles are alive; for the memory inside, the caller of `capture` vouched.
        unsafe { call!(&self.device, cuGraphLaunch(self.executable, stream.handle())) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: made once; the driver frees it when running launches have ended.
        unsafe { (self.device.functions().cuGraphExecDestroy)(self.executable) };
    }
}

/// A capture under way; ends it when dropped.
struct Capture<'a> {
    stream: &'a DeviceStream,
    ended: bool,
}

impl Capture<'_> {
    fn end(mut self) -> Result<CUgraph> {
        self.ended = true;
        let device = self.stream.device();
        device.bind()?;
        let mut graph = std::ptr::null_mut();
        // SAFETY: this thread began the capture; writes one handle.
        unsafe { call!(device, cuStreamEndCapture(self.stream.handle(), &raw mut graph)) }?;
        Ok(graph)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let device = self.stream.device();
        let _ = device.bind();
        let mut graph: CUgraph = std::ptr::null_mut();
        // SAFETY: this thread began the capture; the graph, if there is one, is destroyed once.
        unsafe {
            (device.functions().cuStreamEndCapture)(self.stream.handle(), &raw mut graph);
            if !graph.is_null() {
                (device.functions().cuGraphDestroy)(graph);
            }
        }
    }
}
