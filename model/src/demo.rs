//! The demo model and its EAGLE-3 draft, embedded in the binary.
//!
//! stories-moe is a small mixture-of-experts model in Kimi-K2.5's weight format (INT4 experts,
//! everything else bf16); its README in the repository says how it was made and what it is worth.
//! It makes the whole engine usable without a download. Invariant: the weight files start at a
//! multiple of 64 bytes, so that views into them are aligned as in a mapped file. Start reading at
//! [`MODEL`].

use crate::weights::EmbeddedFiles;

/// The target: `DeepseekV3ForCausalLM`, 8 layers, 16 experts, vocabulary of 4096.
pub static MODEL: EmbeddedFiles = EmbeddedFiles {
    name: "stories-moe",
    texts: &[
        ("config.json", include_str!("../demo/stories-moe/config.json")),
        ("generation_config.json", include_str!("../demo/stories-moe/generation_config.json")),
        ("tokenizer.json", include_str!("../demo/stories-moe/tokenizer.json")),
        ("tokenizer_config.json", include_str!("../demo/stories-moe/tokenizer_config.json")),
    ],
    weights: &MODEL_WEIGHTS.0,
};

/// Its draft: `LlamaForCausalLMEagle3`, one layer, draft vocabulary of 2048.
pub static DRAFT: EmbeddedFiles = EmbeddedFiles {
    name: "stories-moe-eagle3",
    texts: &[("config.json", include_str!("../demo/stories-moe-eagle3/config.json"))],
    weights: &DRAFT_WEIGHTS.0,
};

/// Takes the weights of `files` out of this process's memory, if they are the demo's: they were
/// copied, and come back from the program's file when they are read again.
pub(crate) fn release(files: &EmbeddedFiles) {
    #[cfg(target_os = "linux")]
    for own in [&MODEL, &DRAFT] {
        if std::ptr::eq(own, files) {
            let page = rustix::param::page_size();
            let skipped = files.weights.as_ptr().align_offset(page).min(files.weights.len());
            let pages = &files.weights[skipped..];
            let bytes = pages.len() / page * page;
            // SAFETY: whole pages of the program's constants. Paging out keeps their contents, be
            // they mapped from the program's file or not. That it may fail is harmless: they only
            // stay in memory then.
            let _ = unsafe {
                let first = pages.as_ptr().cast_mut().cast();
                rustix::mm::madvise(first, bytes, rustix::mm::Advice::LinuxPageOut)
            };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = files;
}

/// Byte arrays are aligned to one byte by themselves; a mapped file is aligned to a page.
#[repr(C, align(64))]
struct Aligned<T: ?Sized>(T);

static MODEL_WEIGHTS: &Aligned<[u8]> =
    &Aligned(*include_bytes!("../demo/stories-moe/model.safetensors"));
static DRAFT_WEIGHTS: &Aligned<[u8]> =
    &Aligned(*include_bytes!("../demo/stories-moe-eagle3/model.safetensors"));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_aligned() {
        for files in [&MODEL, &DRAFT] {
            assert_eq!(files.weights.as_ptr() as usize % 64, 0, "{}", files.name);
        }
    }
}
