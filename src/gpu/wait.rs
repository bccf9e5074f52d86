//! Waiting for the device: outside a browser by blocking, in one by letting the event loop run.

use super::device::Gpu;
use crate::{Error, Result};
use futures::channel::oneshot;
use std::future::Future;

/// How the mapping of a buffer ended; canceled when the device went away without a word.
pub(super) type Mapping = std::result::Result<std::result::Result<(), wgpu::BufferAsyncError>, oneshot::Canceled>;

impl Gpu {
    /// The bytes of a host-visible buffer, once the device is done with it.
    pub(super) async fn map(&self, staging: &wgpu::Buffer) -> Result<Vec<u8>> {
        let (sender, receiver) = oneshot::channel();
        staging.map_async(wgpu::MapMode::Read, .., move |result| {
            // The receiver is gone when the caller no longer waits.
            let _ = sender.send(result);
        });
        self.wait(None)?;
        let answer = self.answer(receiver).await;
        match self.mapped(answer, staging, staging.size()) {
            Ok(data) => Ok(data),
            Err(error) => Err(self.fate(error).await),
        }
    }

    /// The first `bytes` bytes of a buffer whose mapping ended in `result`; unmaps it.
    pub(super) fn mapped(&self, result: Mapping, staging: &wgpu::Buffer, bytes: u64) -> Result<Vec<u8>> {
        self.check()?;
        let failed = |reason: String| Error::Device { message: format!("readback: {reason}") };
        match result {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(failed(error.to_string())),
            Err(oneshot::Canceled) => return Err(failed("the device never answered".into())),
        }
        let view = staging.get_mapped_range(..bytes).map_err(|error| failed(error.to_string()))?;
        let data = view.to_vec();
        drop(view);
        staging.unmap();
        Ok(data)
    }

    /// Lets callbacks of finished work run. Never waits.
    pub(super) fn poll(&self) -> Result<()> {
        self.poll_device(wgpu::PollType::Poll)
    }

    /// Blocks until a submission, or everything submitted, is done and its callbacks have run. In a browser it returns at
    /// once: there the event loop calls back.
    pub(super) fn wait(&self, submission: Option<wgpu::SubmissionIndex>) -> Result<()> {
        self.poll_device(wgpu::PollType::Wait { submission_index: submission, timeout: None })
    }

    fn poll_device(&self, how: wgpu::PollType) -> Result<()> {
        let polled = self.device.poll(how);
        // What the device itself has said tells more than that polling failed.
        self.check()?;
        polled.map(|_| ()).map_err(|error| Error::Device { message: error.to_string() })
    }

    /// Awaits an answer of the device without blocking for it: outside a browser nobody calls back unless somebody looks, so it
    /// looks, for a moment each time.
    #[cfg(not(target_arch = "wasm32"))]
    pub(super) async fn awaited<F: Future + Unpin>(&self, mut answer: F) -> Result<F::Output> {
        use futures::FutureExt;
        use std::task::Poll;
        const MOMENT: std::time::Duration = std::time::Duration::from_micros(200);
        std::future::poll_fn(|context| {
            if let Err(error) = self.poll() {
                return Poll::Ready(Err(error));
            }
            if let Poll::Ready(output) = answer.poll_unpin(context) {
                return Poll::Ready(Ok(output));
            }
            // It is not done yet, or it is: the next look tells.
            let _ = self.device.poll(wgpu::PollType::Wait { submission_index: None, timeout: Some(MOMENT) });
            context.waker().wake_by_ref();
            Poll::Pending
        })
        .await
    }

    /// Awaits an answer of the device: the event loop calls back.
    #[cfg(target_arch = "wasm32")]
    pub(super) async fn awaited<F: Future + Unpin>(&self, answer: F) -> Result<F::Output> {
        Ok(self.answer(answer).await)
    }

    /// Awaits an answer of the device, after [`Gpu::wait`].
    #[cfg(not(target_arch = "wasm32"))]
    pub(super) async fn answer<F: Future>(&self, answer: F) -> F::Output {
        answer.await
    }

    /// Awaits an answer of the device. Firefox looks for finished work only every 100 ms, or when something is
    /// submitted: so empty submissions go out while waiting.
    #[cfg(target_arch = "wasm32")]
    pub(super) async fn answer<F: Future + Unpin>(&self, mut answer: F) -> F::Output {
        use futures::future::{select, Either};
        loop {
            match select(answer, std::pin::pin!(tick())).await {
                Either::Left((output, _)) => return output,
                Either::Right(((), unanswered)) => answer = unanswered,
            }
            self.queue.submit([]);
        }
    }
}

/// A millisecond of the event loop, or what the browser makes of it.
#[cfg(target_arch = "wasm32")]
pub(super) async fn tick() {
    use wasm_bindgen::prelude::*;
    #[wasm_bindgen]
    extern "C" {
        #[wasm_bindgen(js_name = setTimeout)]
        fn set_timeout(callback: &JsValue, milliseconds: u32);
    }
    let (sender, receiver) = oneshot::channel();
    let callback = Closure::once_into_js(move || {
        // The receiver is gone when the device answered first.
        let _ = sender.send(());
    });
    set_timeout(&callback, 1);
    // The sender cannot be dropped before it has fired: the browser holds the callback.
    let _ = receiver.await;
}
